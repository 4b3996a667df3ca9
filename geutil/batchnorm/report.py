"""The report of a fold: the folds, and the refusals with their reasons."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from geutil.notebook_display import Shown
from geutil.select.names import with_layer


@dataclass(frozen=True)
class Folded:
    """A batch norm that was folded.

    Attributes:
        norm: the batch norm, by name.
        layer: the layer that took it in, by the name of its op.
        layer_type: the type of that op.
        into: the op that now does the work of both.
        forward: whether the layer comes after the norm.
        signature: of a model, the signature whose graph it is in; "" for graphs.
        keras_layer: the path of the Keras layer that the norm is in; "" if none is.

    Names in the body of a function begin with the function's, and a slash.
    """

    norm: str
    layer: str
    layer_type: str
    into: str
    forward: bool = False
    signature: str = ""
    keras_layer: str = ""


@dataclass(frozen=True)
class Refused:
    """A batch norm that was left alone.

    Attributes:
        norm: the batch norm, by name.
        reason: why.
        op: the op that stands in the way.
        signature: of a model, the signature whose graph it is in; "" for graphs.
        keras_layer: the path of the Keras layer that the norm is in; "" if none is.
    """

    norm: str
    reason: str
    op: str
    signature: str = ""
    keras_layer: str = ""


@dataclass(frozen=True)
class FoldReport(Shown):
    """Every batch norm of a graph: folded, or refused with the reason.

    Attributes:
        folded: the batch norms that were folded, in the order of the graph; a norm of
            several layers that are added, joined or stacked once for each layer.
        refused: those that were not.
        step: the variable that counts the training steps, where one does.
    """

    folded: tuple[Folded, ...]
    refused: tuple[Refused, ...]
    step: Any = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        # A norm that several layers take in has an entry for each.
        folded = len({(entry.signature, entry.norm) for entry in self.folded})
        refused = len(self.refused)
        entries: list[Folded | Refused] = [*self.folded, *self.refused]
        # Signatures may hold norms of the same name: with several, entries name theirs.
        several = len({entry.signature for entry in entries}) > 1

        def label(entry: Folded | Refused) -> str:
            name = with_layer(entry.keras_layer, entry.norm)
            return f"{entry.signature}: {name}" if several else name

        total = folded + refused
        lines = [f"{folded} of {total} batch norm(s) folded, {refused} refused"]
        if self.folded:
            width = max(len(label(entry)) for entry in self.folded)
            lines.append("folded:")
            lines += [
                f"  {label(entry):<{width}}  into {entry.layer_type} '{entry.layer}'"
                + (" behind it" if entry.forward else "")
                for entry in self.folded
            ]
        if self.refused:
            lines.append("refused:")
            lines += [
                f"  {label(entry)}: '{entry.op}' {entry.reason}"
                for entry in self.refused
            ]
        return "\n".join(lines)
