"""Batch-norm folding."""

from geutil.batchnorm.folding import fold_batch_norms
from geutil.batchnorm.report import Folded, FoldReport, Refused

__all__ = ["FoldReport", "Folded", "Refused", "fold_batch_norms"]
