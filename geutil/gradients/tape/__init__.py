"""Reverse mode over a recorded tape: gradients that are added up, and freed, early."""

from geutil.errors import TapeError
from geutil.gradients.tape.engine import TapeEngine, imperative_grad
from geutil.gradients.tape.entries import (
    Tape,
    TapeEntry,
    VSpace,
    numpy_vspace,
    tensorflow_vspace,
)

__all__ = [
    "Tape",
    "TapeEngine",
    "TapeEntry",
    "TapeError",
    "VSpace",
    "imperative_grad",
    "numpy_vspace",
    "tensorflow_vspace",
]
