"""Compilation for tests: programs that run once."""

from functools import partial

import jax

quick_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
"""`jax.jit` for a program that runs once: it compiles in half the time, and runs slowly."""
