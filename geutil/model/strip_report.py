"""Options of stripping, and its report: every part, stripped or left, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from geutil.lazy import Shown

Action: TypeAlias = Literal["removed", "turned", "kept"]
# Entries of a printed report; the rest is counted.
_SHOWN = 20


@dataclass(frozen=True)
class Stripped:
    """One part of a model that serves training, and the action taken.

    Attributes:
        action: "removed"; "turned" into its inference form; or "kept".
        kind: "switch", "dropout", "noise", "random", "batch norm", "diagnostic", "side
            effect", "input", "variable" or "body".
        name: the op, input or variable.
        reason: the reason for the action.
        keras_layer: the path of the Keras layer that it is in; "" if there is none.

    Example:
        >>> from geutil.model import Stripped
        >>> print(Stripped("removed", "dropout", "drop/Mul", "its input passes"))
        removed dropout 'drop/Mul': its input passes
    """

    action: Action
    kind: str
    name: str
    reason: str
    keras_layer: str = ""

    def __str__(self) -> str:
        layer = f" of layer '{self.keras_layer}'" if self.keras_layer else ""
        return f"{self.action} {self.kind} '{self.name}'{layer}: {self.reason}"


@dataclass(frozen=True)
class StripReport(Shown):
    """The changes and omissions of `Model.strip_training`, each with the reason.

    Attributes:
        entries: one for each candidate, in the order of the decisions.
        dropped_ops: the names of the ops that are not in the result, in graph order.

    Example:
        >>> from geutil.model import StripReport
        >>> print(StripReport())
        nothing to strip
    """

    entries: tuple[Stripped, ...] = ()
    dropped_ops: tuple[str, ...] = ()

    @property
    def removed(self) -> tuple[Stripped, ...]:
        """The parts that were removed."""
        return self._by("removed")

    @property
    def turned(self) -> tuple[Stripped, ...]:
        """The parts that were replaced by their inference form."""
        return self._by("turned")

    @property
    def kept(self) -> tuple[Stripped, ...]:
        """The candidates that were kept."""
        return self._by("kept")

    def _by(self, action: Action) -> tuple[Stripped, ...]:
        return tuple(entry for entry in self.entries if entry.action == action)

    def __bool__(self) -> bool:
        """Return whether anything was removed or turned."""
        return bool(self.removed or self.turned)

    def __str__(self) -> str:
        title = (
            f"{len(self.removed)} removed, {len(self.turned)} turned, "
            f"{len(self.kept)} kept; {len(self.dropped_ops)} ops dropped"
        )
        lines = [title if self else "nothing to strip"]
        for group in (self.removed, self.turned, self.kept):
            lines += [f"  {entry}" for entry in group[:_SHOWN]]
            if len(group) > _SHOWN:
                rest = len(group) - _SHOWN
                lines.append(f"  and {rest} more, in .{group[0].action}")
        return "\n".join(lines)


@dataclass(frozen=True)
class StripOptions:
    """The caller's choices, which the graph does not tell."""

    # The value for each input or placeholder that is to be a constant.
    switches: Mapping[str, Any] = field(default_factory=dict)
    # For batch norms the variables of their moving mean and variance.
    statistics: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    keep: tuple[str, ...] = ()  # Ops and name scopes that stay as they are.
    # For ops their value at inference; None is that of an input.
    neutral: Mapping[str, Any] = field(default_factory=dict)

    def keeps(self, name: str) -> bool:
        """Return whether an op of that name stays as it is."""
        return any(name == scope or name.startswith(f"{scope}/") for scope in self.keep)
