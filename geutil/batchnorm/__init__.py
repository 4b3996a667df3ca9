"""Batch-norm folding."""

from geutil.batchnorm.fold import fold_batch_norms
from geutil.batchnorm.fold_report import (
    CheckError,
    CheckResult,
    Folded,
    FoldReport,
    OutputDifference,
    Refused,
    check,
)

__all__ = [
    "CheckError",
    "CheckResult",
    "FoldReport",
    "Folded",
    "OutputDifference",
    "Refused",
    "check",
    "fold_batch_norms",
]
