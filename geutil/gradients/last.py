"""The reports on the gradients that were built last, and their warnings."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import tensorflow as tf

from geutil.errors import ArgumentTypeError
from geutil.gradients.report import Report
from geutil.graph.kinds import Graph, is_func_graph, is_graph, type_name
from geutil.graph.state import state_of

_logger = logging.getLogger("geutil")


@dataclass
class _Published:
    """A report, and which one it was."""

    number: int
    report: Report


class _Last:
    """The last report of each thread, and of all threads that have ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = count()
        self._of: dict[threading.Thread, _Published] = {}
        self._of_ended: _Published | None = None

    def publish(self, report: Report) -> None:
        with self._lock:
            self._take_over_from_ended()
            found = _Published(next(self._numbers), report)
            self._of[threading.current_thread()] = found

    def replace(self, old: Report, new: Report) -> None:
        with self._lock:
            for found in (*self._of.values(), self._of_ended):
                if found is not None and found.report is old:
                    found.report = new

    def report(self) -> Report | None:
        with self._lock:
            self._take_over_from_ended()
            own = self._of.get(threading.current_thread())
            return _report(_newer(own, self._of_ended))

    def _take_over_from_ended(self) -> None:
        for thread in [t for t in self._of if not t.is_alive()]:
            self._of_ended = _newer(self._of.pop(thread), self._of_ended)


def _newer(a: _Published | None, b: _Published | None) -> _Published | None:
    if a is None or b is None:
        return a or b
    return a if a.number > b.number else b


def _report(found: _Published | None) -> Report | None:
    return None if found is None else found.report


_last = _Last()


def publish(report: Report, graph: Graph) -> None:
    """Make a report the last one of a graph and of this thread; log its warnings.

    Args:
        report: the report.
        graph: the graph of what is differentiated. Graphs around it know it as well,
            and the one that is being made, where gradients may go.
    """
    for known in (graph, tf.compat.v1.get_default_graph()):
        for around in _and_around(known):
            state_of(around).report = report
    _last.publish(report)
    for warning in report.warnings:
        _logger.warning("%s", warning)


def replace_last(old: Report, new: Report, graph: Graph) -> None:
    """Let a report take the place of another one; log nothing."""
    for around in _and_around(graph):
        if state_of(around).report is old:
            state_of(around).report = new
    _last.replace(old, new)


def _and_around(graph: Graph) -> Iterator[Graph]:
    """Yield a graph and, of a function, those that it was traced in."""
    while True:
        yield graph
        outer = getattr(graph, "outer_graph", None)
        if outer is None or not is_func_graph(outer):
            return
        graph = outer


def last_report(of: Any = None) -> Report | None:
    """Return the report on the gradients that were built last, or None.

    Those of a `checkpointed` function count as well. Each of its calls has gradients
    and a report of its own. The backward pass builds them from the last call to the
    first, so that after a step with several calls this is the report on the first.

    Args:
        of: a graph, or what has one: a gradient, any other tensor or op, a
            ConcreteFunction. The report is on the gradients built last in that graph,
            or in functions traced in it. None: on those that this thread built last, or
            a thread that has ended, as those have in which a `tf.distribute` strategy
            traces.

    Raises:
        ArgumentTypeError: `of` has no graph.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import gradients, last_report
        >>> with tf.Graph().as_default():
        ...     x = tf.ones([4])
        ...     y = tf.sin(x)
        ...     (slope,) = gradients(tf.exp(tf.cos(y)), x, checkpoints=[y])
        >>> last_report().kept[0].reason
        'chosen: list'
        >>> last_report(slope) is last_report()
        True
    """
    if of is None:
        return _last.report()
    graph = of if is_graph(of) else getattr(of, "graph", None)
    if not is_graph(graph):
        raise ArgumentTypeError(
            "expected a graph, a tensor or op of one, or a ConcreteFunction, got "
            f"{type_name(of)}; of a tf.function pass what get_concrete_function returns"
        )
    report: Report | None = state_of(graph).report
    return report
