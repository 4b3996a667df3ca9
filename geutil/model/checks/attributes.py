"""The attributes of a node: complete, of the declared type, with possible values."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from geutil.model.checks.signatures import Signature, Signatures
from geutil.model.checks.tensors import check_shape, check_tensor, check_type
from geutil.model.errors import ModelError

_FIELDS = {
    "string": "s",
    "int": "i",
    "float": "f",
    "bool": "b",
    "type": "type",
    "shape": "shape",
    "tensor": "tensor",
    "func": "func",
}
_LIST = re.compile(r"list\((\w+)\)")


def check_attributes(
    attributes: Mapping[str, Any],
    signature: Signature,
    signatures: Signatures,
    *,
    in_function: bool,
) -> None:
    """Check the attributes of one node.

    Attributes that the definition does not mention are left to TensorFlow: graphs of
    other versions bear such.

    Args:
        attributes: the `AttrValue` protos by name.
        signature: the definition of the node's op type.
        signatures: knows which functions there are.
        in_function: the node is in a function's body, where an attribute may stand for
            one of the function's own.

    Raises:
        ModelError: one is missing, of another type, or has an impossible value.

    Cost: linear in the attributes.
    """
    for name in signature.required:
        if name not in attributes:
            raise ModelError(f"attribute '{name}' is missing")
    declared = signature.attributes
    for name, value in attributes.items():
        kind = value.WhichOneof("value")
        if kind == "placeholder" and in_function:
            continue
        expected = declared.get(name)
        if expected is not None:
            _check_kind(name, value, kind, expected)
        check = _CHECKS.get(kind)
        try:
            if check is not None:
                check(value)
        except ModelError as error:
            raise ModelError(f"attribute '{name}': {error}") from error
        if kind == "func" and expected is not None:
            _check_function(name, value.func.name, signatures)
        elif kind == "list" and expected == "list(func)":
            for func in value.list.func:
                _check_function(name, func.name, signatures)


@functools.cache
def _field_and_element(declared: str) -> tuple[str | None, str | None]:
    """Return the field of `AttrValue` for a declared type, and that of its list."""
    match = _LIST.fullmatch(declared)
    if match:
        return "list", _FIELDS.get(match[1])
    return _FIELDS.get(declared), None


def _check_kind(name: str, value: Any, kind: str | None, declared: str) -> None:
    field, element = _field_and_element(declared)
    if field is None:
        return
    if kind != field:
        raise ModelError(
            f"attribute '{name}' is of type {kind or 'none at all'}; declared: "
            f"{declared}"
        )
    if element is not None:
        for found, _ in value.list.ListFields():
            if found.name != element:
                raise ModelError(
                    f"attribute '{name}' lists values of type {found.name}; declared: "
                    f"{declared}"
                )


def _check_function(attribute: str, name: str, signatures: Signatures) -> None:
    # An op type may stand in for a function, and no name for no function.
    if name and signatures.get(name) is None:
        raise ModelError(
            f"attribute '{attribute}' names the function '{name}', which the graph's "
            "library does not hold"
        )


def _check_list(value: Any) -> None:
    for number in value.list.type:
        check_type(number)
    for shape in value.list.shape:
        check_shape(shape)
    for tensor in value.list.tensor:
        check_tensor(tensor)


_CHECKS: dict[str | None, Callable[[Any], Any]] = {
    "type": lambda value: check_type(value.type),
    "shape": lambda value: check_shape(value.shape),
    "tensor": lambda value: check_tensor(value.tensor),
    "list": _check_list,
}
