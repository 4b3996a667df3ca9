"""Batch-norm folding."""

from geutil.batchnorm.checking import CheckError, CheckResult, OutputDifference, check
from geutil.batchnorm.fold import fold_batch_norms
from geutil.batchnorm.report import Folded, FoldReport, Refused

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
