"""What makes TensorFlow's shape functions abort the process, by op type.

TensorFlow infers shapes while it imports, and most shape functions refuse what makes no
sense. These do not. Each rule was found by a damaged graph that took the process down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from geutil.graph.protos import PARSE_ERRORS, TensorProto
from geutil.model.errors import ModelError
from geutil.model.files.checks.tensors import MOST_DIMENSIONS, type_name

Rule: TypeAlias = Callable[[Any, Sequence[Any]], None]
"""Takes a `NodeDef` and those of its producers, None for unknown ones; raises
`ModelError`."""


_RUNTIME_ONLY = ("_FusedQuantized", "_Quantized", "_ScopedAllocator")
"""Begin the names of ops that TensorFlow's optimizers make while they run a graph."""

_SHAPES_OF_OUTPUTS = {
    "InfeedDequeueTuple": ("shapes", "dtypes"),
    "XlaCallModule": ("Sout", "Tout"),
}
"""A list of shapes is written to the outputs, however many there are."""

_ONE_ELEMENT = {
    "QueueDequeueMany": 1,
    "QueueDequeueManyV2": 1,
    "QueueDequeueUpTo": 1,
    "QueueDequeueUpToV2": 1,
}
"""The input that a constant must give one number to."""

_LEAST_RANKS = {
    "BoostedTreesAggregateStats": (1, 1, 1, 1),
    "BoostedTreesExampleDebugOutputs": (0, 1),
    "BoostedTreesPredict": (0, 1),
    "BoostedTreesTrainingPredict": (0, 1, 1, 1),
    "XlaSparseGradientsStack": (2,),
}
"""How many dimensions each input must have at least; the last goes for the rest."""

_RANK_GIVERS = {
    "ConjugateTranspose": 1,
    "MirrorPad": 1,
    "Pad": 1,
    "PadV2": 1,
    "Slice": 1,
    "Transpose": 1,
    "_MklConjugateTranspose": 1,
    "_MklTranspose": 1,
}
"""The input whose size gives the number of dimensions, which TensorFlow allocates."""

_NUMBERS = {"CollectiveGather": "group_size"}
"""An attribute that must fit into 32 bits."""


def check_hazards(node: Any, producers: Sequence[Any]) -> None:
    """Raise `ModelError` if a node would take the process down.

    Args:
        node: a `NodeDef` whose attributes passed.
        producers: the `NodeDef` that each of its inputs comes from, None for arguments.

    Cost: constant, but for the few op types with a rule.
    """
    rule = _RULES.get(node.op)
    if rule is not None:
        rule(node, producers)
    elif node.op.startswith(_RUNTIME_ONLY):
        raise ModelError(
            "TensorFlow makes this op only while it runs a graph; save the graph as it "
            "was before its optimizers"
        )


def _constant(node: Any, producers: Sequence[Any]) -> None:
    attributes = node.attr
    # Shape functions read constants as the type that the inputs are declared to have.
    if "value" not in attributes or "dtype" not in attributes:
        return
    declared, value = attributes["dtype"], attributes["value"]
    if "placeholder" in (declared.WhichOneof("value"), value.WhichOneof("value")):
        return
    if value.tensor.dtype != declared.type:
        raise ModelError(
            f"its value is {type_name(value.tensor.dtype)}, but its type is "
            f"{type_name(declared.type)}"
        )


def _gather(node: Any, producers: Sequence[Any]) -> None:
    attributes = node.attr
    if "batch_dims" not in attributes:
        return
    shapes = [known_shape(p) for p in producers[:2]]
    most = min([len(s) for s in shapes if s is not None], default=MOST_DIMENSIONS)
    batch = attributes["batch_dims"].i
    if not -most <= batch <= most:
        raise ModelError(f"'batch_dims' is {batch}, of at most {most} dimensions")


def _shapes(node: Any, producers: Sequence[Any]) -> None:
    shapes, types = _SHAPES_OF_OUTPUTS[node.op]
    given = len(node.attr[shapes].list.shape) if shapes in node.attr else 0
    outputs = len(node.attr[types].list.type) if types in node.attr else 0
    if given > outputs:
        raise ModelError(f"'{shapes}' lists {given} shapes for {outputs} outputs")


def _one_element(node: Any, producers: Sequence[Any]) -> None:
    place = _ONE_ELEMENT[node.op]
    shape = known_shape(producers[place]) if place < len(producers) else None
    if shape is not None and math.prod(shape) != 1:
        raise ModelError(f"its input number {place} is of shape {shape}, not a scalar")


def _ranks(node: Any, producers: Sequence[Any]) -> None:
    least = _LEAST_RANKS[node.op]
    for place, producer in enumerate(producers):
        shape = known_shape(producer)
        wanted = least[min(place, len(least) - 1)]
        if shape is not None and len(shape) < wanted:
            raise ModelError(
                f"its input number {place} is of shape {shape}; it needs at least "
                f"{wanted} dimensions"
            )


def _rank_giver(node: Any, producers: Sequence[Any]) -> None:
    place = _RANK_GIVERS[node.op]
    shape = known_shape(producers[place]) if place < len(producers) else None
    # Paddings are two numbers for each dimension.
    if shape and math.prod(size for size in shape if size > 0) > 2 * MOST_DIMENSIONS:
        raise ModelError(
            f"its input number {place} is of shape {shape}, for more than "
            f"{MOST_DIMENSIONS} dimensions"
        )


def _split_vector(node: Any, producers: Sequence[Any]) -> None:
    sizes = known_shape(producers[1]) if len(producers) > 1 else None
    if sizes is not None and len(sizes) != 1:
        raise ModelError(f"its input number 1 is of shape {sizes}, not a vector")


def _tuple_mask(node: Any, producers: Sequence[Any]) -> None:
    mask = node.attr["tuple_mask"].s if "tuple_mask" in node.attr else b""
    try:
        dimensions = len(TensorProto.FromString(mask).tensor_shape.dim)
    except PARSE_ERRORS:
        dimensions = 0
    if not dimensions:
        raise ModelError("'tuple_mask' holds no tensor")


def _small_number(node: Any, producers: Sequence[Any]) -> None:
    name = _NUMBERS[node.op]
    if name in node.attr and abs(node.attr[name].i) >= 2**31:
        raise ModelError(f"'{name}' is {node.attr[name].i}")


def known_shape(producer: Any) -> list[int] | None:
    """Return the shape of a constant or a placeholder, or None if it is unknown."""
    if producer is None:
        return None
    shape = None
    if producer.op == "Const" and "value" in producer.attr:
        shape = producer.attr["value"].tensor.tensor_shape
    elif producer.op == "Placeholder" and "shape" in producer.attr:
        shape = producer.attr["shape"].shape
    if shape is None or shape.unknown_rank:
        return None
    return [d.size for d in shape.dim]


_RULES: dict[str, Rule] = {
    "Const": _constant,
    "GatherV2": _gather,
    **dict.fromkeys(_SHAPES_OF_OUTPUTS, _shapes),
    **dict.fromkeys(_ONE_ELEMENT, _one_element),
    **dict.fromkeys(_LEAST_RANKS, _ranks),
    **dict.fromkeys(_NUMBERS, _small_number),
    **dict.fromkeys(_RANK_GIVERS, _rank_giver),
    "SplitV": _split_vector,
    "SplitDedupData": _tuple_mask,
}
