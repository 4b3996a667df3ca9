"""The report on the gradients that were built last, and its warnings."""

from __future__ import annotations

import logging
import threading

from geutil.gradients.report import Report

_logger = logging.getLogger("geutil")
_last = threading.local()


def publish(report: Report) -> None:
    """Make a report the last one of this thread, and log its warnings."""
    _last.report = report
    for warning in report.warnings:
        _logger.warning("%s", warning)


def replace_last(old: Report, new: Report) -> None:
    """Make a report the last one of this thread if another one is; log nothing."""
    if getattr(_last, "report", None) is old:
        _last.report = new


def last_report() -> Report | None:
    """Return the report on the last gradients that this thread built, or None.

    Those of a `checkpointed` function count as well. Each of its calls has gradients
    and a report of its own. The backward pass builds them from the last call to the
    first, so that after a step with several calls this is the report on the first.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import gradients, last_report
        >>> with tf.Graph().as_default():
        ...     x = tf.ones([4])
        ...     y = tf.sin(x)
        ...     _ = gradients(tf.exp(tf.cos(y)), x, checkpoints=[y])
        >>> last_report().kept[0].reason
        'chosen: list'
    """
    report: Report | None = getattr(_last, "report", None)
    return report
