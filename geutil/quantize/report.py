"""The report of quantization: ops that are quantized, and others with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from geutil.graph.types import Tensor, require_tensor
from geutil.lazy import Shown
from geutil.quantize.planning.network import quantized_value
from geutil.quantize.spec import Format
from geutil.select.selections import with_layer


@dataclass(frozen=True)
class Quantized:
    """An op that is quantized.

    Attributes:
        op: the op, by name.
        op_type: its type.
        kernel: the op whose kernel computes it: itself, or the op that it is fused
            into.
        weights: how its weights are stored; None if it has none.
        weights_range: the name of their range, as in `<name>/min`.
        result: how its result is stored; None if another op stores it.
        result_range: the name of its range; "" if it is fixed or forwarded.
        into: the tensor with its quantized result, by name: the tensor to fetch. "" if
            that is the result of another op.
        signature: the signature of the model whose graph it is in; "" for graphs.
        note: why its weights deviate from the usual storage of the scheme; "" if they
            do not.
        keras_layer: the path of the Keras layer that it is in; "" if there is none.
    """

    op: str
    op_type: str
    kernel: str
    weights: Format | None = None
    weights_range: str = ""
    result: Format | None = None
    result_range: str = ""
    signature: str = ""
    into: str = ""
    note: str = ""
    keras_layer: str = ""

    def __str__(self) -> str:
        if self.kernel != self.op:
            return f"part of '{self.kernel}'"
        parts = []
        if self.weights is not None:
            note = f", {self.note}" if self.note else ""
            parts.append(f"weights {self.weights} ({self.weights_range}){note}")
        if self.result is not None:
            where = f" ({self.result_range})" if self.result_range else ", fixed range"
            parts.append(f"result {self.result}{where}")
        return "; ".join(parts) or "in the range of what it reads"


@dataclass(frozen=True)
class Skipped:
    """An op that was not quantized.

    Attributes:
        op: the op, by name.
        op_type: its type.
        reason: why it was not quantized.
        has_kernel: whether TFLite has an int8 kernel for it, so that it counts in the
            coverage.
        signature: the signature of the model whose graph it is in; "" for graphs.
        keras_layer: the path of the Keras layer that it is in; "" if there is none.
    """

    op: str
    op_type: str
    reason: str
    has_kernel: bool
    signature: str = ""
    keras_layer: str = ""


@dataclass(frozen=True)
class QuantizeReport(Shown):
    """The ops of a graph that compute with data: quantized, or not and why.

    Attributes:
        quantized: the ops that are quantized, in the order of the graph.
        skipped: the ops that are not quantized.
        warnings: possible mistakes in the call, such as a scope without ops.
        variables: the variables of the ranges by name: `<range>/min` and `/max`, and
            `<range>/learnt`, which counts a moving average in training.
        step: the variable that counts the training steps, where one does.
        rewritten: ops that were rewritten in a form that has int8 kernels.
    """

    quantized: tuple[Quantized, ...]
    skipped: tuple[Skipped, ...]
    warnings: tuple[str, ...] = ()
    variables: Mapping[str, Any] = field(
        default_factory=dict, compare=False, repr=False
    )
    step: Any = field(default=None, compare=False, repr=False)
    rewritten: tuple[str, ...] = ()

    @property
    def coverage(self) -> float:
        """The fraction of ops with int8 kernels that are quantized.

        1.0 if there are none.
        """
        missed = sum(entry.has_kernel for entry in self.skipped)
        total = len(self.quantized) + missed
        return len(self.quantized) / total if total else 1.0

    def tensor(self, tensor: Tensor) -> Tensor:
        """Return the quantized version of a tensor of the graph, or the tensor itself.

        Names and Python variables still refer to the old tensors. Fetch this tensor
        instead of a final result, or return it from a function that is being traced.

        Raises:
            ArgumentTypeError: `tensor` is not a tensor of a graph.

        Example:
            >>> import tensorflow as tf
            >>> from geutil.quantize import quantize
            >>> with tf.Graph().as_default() as graph:
            ...     x = tf.compat.v1.placeholder(tf.float32, [None, 8], "x")
            ...     logits = tf.matmul(x, tf.ones([8, 2]), name="logits")
            >>> report = quantize(graph, is_training=False)
            >>> report.tensor(logits).name
            'logits/act_quant/FakeQuantWithMinMaxVars:0'
        """
        require_tensor(tensor)
        quantized = quantized_value(tensor)
        return tensor if quantized is None else quantized

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """Yield the lines of the text: totals, warnings, then an op a line."""
        yield (
            f"{len(self.quantized)} op(s) quantized, {len(self.skipped)} skipped, "
            f"coverage {self.coverage:.3f}"
        )
        yield from (f"warning: {warning}" for warning in self.warnings)
        yield from (f"rewritten: {line}" for line in self.rewritten)
        listed: dict[str, Sequence[Quantized | Skipped]] = {
            "quantized": self.quantized,
            "skipped": self.skipped,
        }
        several = len({e.signature for part in listed.values() for e in part}) > 1
        for title, entries in listed.items():
            if entries:
                yield f"{title}:"
            for entry in entries:
                where = f"{entry.signature}: " if several else ""
                what = entry if isinstance(entry, Quantized) else entry.reason
                name = with_layer(entry.keras_layer, entry.op)
                yield f"  {where}{name} ({entry.op_type}): {what}"
