"""PReLU as Keras writes it, for which TFLite has no int8 kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from geutil.graph.kinds import Operation, Tensor
from geutil.graph.op_types import ADDITIONS
from geutil.quantize.finding.network import Network


@dataclass(frozen=True, eq=False)
class Prelu:
    """A sum `relu(x) + -alpha * relu(-x)`.

    Attributes:
        end: the sum.
        product: the product in it.
        slot: which input of the product is `relu(-x)`.
        source: the tensor `x`.
        alpha: the parameter `alpha`.
        ops: its ops.
    """

    end: Operation
    product: Operation
    slot: int
    source: Tensor
    alpha: Tensor
    ops: tuple[Operation, ...]


def find_prelus(network: Network) -> list[Prelu]:
    """Return the PReLUs of a network that nothing else reads the inside of.

    Cost: linear in ops and edges.
    """
    sums = (op for op in network.ops if op.type in ADDITIONS)
    return list(_found(_prelu(op, network) for op in sums))


def _found(matches: Iterable[Prelu | None]) -> Iterable[Prelu]:
    return (match for match in matches if match is not None)


def _prelu(end: Operation, network: Network) -> Prelu | None:
    for positive, product in (end.inputs, reversed(end.inputs)):
        if positive.op.type != "Relu" or product.op.type != "Mul":
            continue
        source = positive.op.inputs[0]
        for slot in (0, 1):
            negative, factor = product.op.inputs[slot].op, product.op.inputs[1 - slot]
            if negative.type != "Relu" or negative.inputs[0].op.type != "Neg":
                continue
            turned = negative.inputs[0].op
            if turned.inputs[0] is not source or factor.op.type != "Neg":
                continue
            alpha = factor.op.inputs[0]
            inner = (positive.op, product.op, negative, turned)
            if not network.is_parameter(alpha) or not _closed(inner, network):
                continue
            return Prelu(end, product.op, slot, source, alpha, (end, *inner))
    return None


def _closed(ops: Iterable[Operation], network: Network) -> bool:
    tensors = [op.outputs[0] for op in ops]
    return all(
        len(network.readers(t)) == 1 and t not in network.results for t in tensors
    )
