"""What a network has learned: pure functions of its parameters, which compile under jit."""

from convjax.analysis.specialisation import (
    Specialisation,
    colour_index,
    specialisation,
    tower_means,
)

__all__ = ["Specialisation", "colour_index", "specialisation", "tower_means"]
