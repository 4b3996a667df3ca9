"""What equalization did, and what it did not do and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Equalized:
    """A layer whose channels were scaled.

    Attributes:
        first: the layer, by the name of its op.
        seconds: the layers that scale its channels back.
        channels: how many channels there are.
        before: the largest range of a channel's weights in the first layer over the
            smallest one, those of zeros left out.
        after: the same, now.
        replaced: the Relu6 ops that were replaced with Relu.
        signature: the signature whose graph it is in.
    """

    first: str
    seconds: tuple[str, ...]
    channels: int
    before: float
    after: float
    replaced: tuple[str, ...] = ()
    signature: str = ""


@dataclass(frozen=True)
class NotEqualized:
    """A layer whose channels were left as they are.

    Attributes:
        layer: the layer, by the name of its op.
        op: the op that stands in the way.
        reason: why.
        signature: the signature whose graph it is in.
    """

    layer: str
    op: str
    reason: str
    signature: str = ""


@dataclass(frozen=True)
class EqualizeReport:
    """Every layer of a model: equalized with those behind it, or not and why.

    Attributes:
        equalized: the layers whose channels were scaled.
        refused: those whose were not.
    """

    equalized: tuple[Equalized, ...]
    refused: tuple[NotEqualized, ...]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{len(self.equalized)} layer(s) equalized, {len(self.refused)} not"
        signatures = {e.signature for e in self.equalized}
        several = len(signatures | {e.signature for e in self.refused}) > 1
        if self.equalized:
            yield "equalized:"
        for entry in self.equalized:
            where = f"{entry.signature}: " if several else ""
            yield (
                f"  {where}{entry.first} with {', '.join(entry.seconds)}: "
                f"{entry.channels} channels, largest range {entry.before:.3g} times "
                f"the smallest, now {entry.after:.3g}"
            )
        if self.refused:
            yield "not:"
        for missed in self.refused:
            where = f"{missed.signature}: " if several else ""
            yield f"  {where}{missed.layer}: '{missed.op}' {missed.reason}"
