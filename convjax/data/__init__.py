"""Labelled images: where they come from, how they are varied, how they are batched."""

from convjax.data.augmentation import Augmentation, normalise
from convjax.data.pipeline import Batch, BatchIterator, Dataset, make_dataset
from convjax.data.sources import ArraySource, Example, Source, load_source

__all__ = [
    "ArraySource",
    "Augmentation",
    "Batch",
    "BatchIterator",
    "Dataset",
    "Example",
    "Source",
    "load_source",
    "make_dataset",
    "normalise",
]
