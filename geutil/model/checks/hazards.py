"""What makes TensorFlow's shape functions abort the process, by op type.

TensorFlow infers shapes while it imports, and most shape functions refuse what makes no
sense. These do not. Each rule was found by a damaged graph that took the process down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from geutil.model.checks.tensors import MOST_DIMENSIONS, type_name
from geutil.model.errors import ModelError

Rule: TypeAlias = Callable[[Mapping[str, Any], Sequence[Any]], None]
"""Takes the attributes of a node and the `NodeDef` of each producer, None if unknown;
raises `ModelError`."""


def check_hazards(node: Any, producers: Sequence[Any]) -> None:
    """Raise `ModelError` if a node would take the process down.

    Args:
        node: a `NodeDef` whose attributes passed.
        producers: the `NodeDef` that each of its inputs comes from, None for arguments.
    """
    rule = _RULES.get(node.op)
    if rule is not None:
        rule(node.attr, producers)


def _constant(attributes: Mapping[str, Any], producers: Sequence[Any]) -> None:
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


def _gather(attributes: Mapping[str, Any], producers: Sequence[Any]) -> None:
    if "batch_dims" not in attributes:
        return
    ranks = [known_rank(p) for p in producers[:2]]
    most = min([r for r in ranks if r is not None], default=MOST_DIMENSIONS)
    batch = attributes["batch_dims"].i
    if not -most <= batch <= most:
        raise ModelError(f"'batch_dims' is {batch}, of at most {most} dimensions")


def known_rank(producer: Any) -> int | None:
    """Return the rank of a constant or a placeholder, or None if it is unknown."""
    if producer is None:
        return None
    if producer.op == "Const":
        return len(producer.attr["value"].tensor.tensor_shape.dim)
    if producer.op == "Placeholder" and "shape" in producer.attr:
        shape = producer.attr["shape"].shape
        return None if shape.unknown_rank else len(shape.dim)
    return None


_RULES: dict[str, Rule] = {
    "Const": _constant,
    "GatherV2": _gather,
}
