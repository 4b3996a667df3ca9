"""The errors that geutil raises on purpose.

Every class derives from `GeutilError` and from the builtin that code written for
`tf.contrib.graph_editor` catches, so `except ValueError` goes on working. A message
says what was asked, which op or tensor stands against it, and what to call instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

_VOCABULARY: ContextVar[Mapping[str, str]] = ContextVar("vocabulary")


class Words:
    """A parameter or call in a message, in the words of those who read it.

    These are Python's words, except inside of `spoken_with`: the command has options
    in place of parameters, and commands in place of functions.

    Args:
        python: Python's words, "overwrite=True" for example.
        *values: values that other words contain, in place of "{}" or at their end.
        key: how vocabularies list it; "" for Python's words up to the first "=".

    Example:
        >>> words = Words("keep=['norm']", "norm")
        >>> print(words)
        keep=['norm']
        >>> with spoken_with({"keep=": "--keep"}):
        ...     print(words)
        --keep norm
    """

    def __init__(self, python: str, *values: object, key: str = "") -> None:
        name, assigned, _ = python.partition("=")
        self.python, self.values, self.key = python, values, key or name + assigned

    def __str__(self) -> str:
        other = vocabulary().get(self.key)
        if other is None:
            return self.python
        if "{" in other:
            return other.format(*self.values)
        return " ".join((other, *map(str, self.values)))


def vocabulary() -> Mapping[str, str]:
    """Return the words that messages have in place of Python's, by their keys."""
    return _VOCABULARY.get({})


@contextmanager
def spoken_with(words: Mapping[str, str]) -> Iterator[None]:
    """Let messages use other words in place of Python's; see `Words`."""
    token = _VOCABULARY.set(words)
    try:
        yield
    finally:
        _VOCABULARY.reset(token)


class GeutilError(Exception):
    """Base of every error that geutil raises on purpose.

    Its message is "subject reason; remedy", without the parts that are empty.

    Attributes:
        subject: the element or parameter that the reason is about.
        reason: the reason of the refusal.
        remedy: the call or argument that would work.
        parameter: the name of the parameter, if the subject is one; "" otherwise.
    """

    def __init__(
        self,
        reason: str = "",
        *,
        subject: str | Words = "",
        remedy: str | Words = "",
    ) -> None:
        self.subject, self.reason, self.remedy = str(subject), reason, str(remedy)
        self.parameter = subject.key[:-1] if isinstance(subject, Words) else ""
        sentence = f"{self.subject} {reason}".lstrip()
        super().__init__(f"{sentence}; {self.remedy}" if self.remedy else sentence)


class ArgumentTypeError(GeutilError, TypeError):
    """An argument is of a type that the function does not take."""


class SelectionError(GeutilError, ValueError):
    """A selection cannot be made: mixed graphs, unknown keyword, no such op."""


class RerouteError(GeutilError, ValueError):
    """A rewiring was refused; the graph is as it was before the call."""


class CycleError(RerouteError):
    """A rewiring would close a cycle.

    Attributes:
        cycle: the names of the ops on the cycle, first and last the same.
    """

    def __init__(self, message: str, cycle: tuple[str, ...]) -> None:
        super().__init__(message)
        self.cycle = cycle


class TransformError(GeutilError, ValueError):
    """A copy or replacement was refused."""


class StaleGraphError(GeutilError, RuntimeError):
    """An edit would have no effect: a Session or a function was built before it."""


class FinalizedGraphError(GeutilError, RuntimeError):
    """The graph was finalized (`tf.Graph.finalize`) and cannot be edited."""


class VerificationError(GeutilError, ValueError):
    """A graph breaks an invariant.

    Attributes:
        violations: one `geutil.graph.invariants.Violation` for each breach.
    """

    def __init__(self, message: str, violations: tuple[object, ...]) -> None:
        super().__init__(message)
        self.violations = violations


class PredictionError(GeutilError, ValueError):
    """The memory of a step cannot be predicted: sizes or an order are missing."""


class PlanError(GeutilError, ValueError):
    """A computation cannot be scheduled, or a schedule has wrong figures."""


class FoldError(GeutilError, ValueError):
    """A batch norm cannot be folded."""


class QuantizeError(GeutilError, ValueError):
    """Quantization cannot be simulated as asked."""


class TFLiteError(GeutilError, ValueError):
    """A TFLite file cannot be read, or edited as asked; it is as it was."""


class TapeError(GeutilError, ValueError):
    """A tape cannot be recorded, or gone back along."""


class MeasurementError(GeutilError, RuntimeError):
    """A step cannot be measured, or the process that measured it did not finish."""


class MissingExtraError(GeutilError, ImportError):
    """A package that geutil needs for this alone is not installed."""


class PlotError(GeutilError, ValueError):
    """A picture cannot be drawn or written as asked."""


class ReportError(GeutilError, ValueError):
    """A page cannot be made or written."""


class ModelError(GeutilError, ValueError):
    """A model cannot be opened, read or written as asked.

    The message names the element found (the file, the node, the signature) and the
    accepted ones.
    """
