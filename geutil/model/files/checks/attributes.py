"""The attributes of a node: complete, of the declared type, with possible values."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from geutil.model.errors import ModelError
from geutil.model.files.checks.signatures import Signature, Signatures
from geutil.model.files.checks.tensors import (
    check_shape,
    check_tensor,
    check_type,
    type_name,
)

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
        try:
            check = _CHECKS.get(kind)
            if check is not None:
                check(value)
            if name in declared:
                _check_declared(value, kind, declared[name], signatures)
        except ModelError as error:
            raise ModelError(f"attribute '{name}' {error}") from error


def _check_declared(
    value: Any, kind: str | None, declaration: Any, signatures: Signatures
) -> None:
    """Check a value against the declaration of its attribute."""
    field, element = _field_and_element(declaration.type)
    if field is None:
        return
    if kind != field:
        raise ModelError(
            f"is of type {kind or 'none at all'}; declared: {declaration.type}"
        )
    if element is None:
        elements = [getattr(value, field)]
    else:
        _check_elements(value.list, element)
        elements = getattr(value.list, element)
    if declaration.HasField("allowed_values"):
        _check_allowed(elements, declaration.allowed_values.list)
    if declaration.has_minimum:
        least = value.i if field == "i" else len(elements)
        if least < declaration.minimum:
            raise ModelError(f"is or has {least}; at least {declaration.minimum}")
    if "func" in (field, element):
        for func in elements:
            _check_function(func.name, signatures)


@functools.cache
def _field_and_element(declared: str) -> tuple[str | None, str | None]:
    """Return the field of `AttrValue` for a declared type, and that of its list."""
    match = _LIST.fullmatch(declared)
    if match:
        return "list", _FIELDS.get(match[1])
    return _FIELDS.get(declared), None


def _check_elements(values: Any, element: str) -> None:
    for found, _ in values.ListFields():
        if found.name != element:
            raise ModelError(f"lists values of type {found.name}; declared: {element}")


def _check_allowed(elements: Iterable[Any], allowed: Any) -> None:
    # Some shape functions of TensorFlow abort the process on a type that is not.
    choice = allowed.type or allowed.s
    for element in elements:
        if element not in choice:
            accepted = ", ".join(map(_named, choice))
            raise ModelError(f"is {_named(element)}; accepted: {accepted}")


def _named(value: Any) -> str:
    return (
        type_name(value)
        if isinstance(value, int)
        else repr(value.decode(errors="replace"))
    )


def _check_function(name: str, signatures: Signatures) -> None:
    # An op type may stand in for a function, and no name for no function.
    if name and signatures.get(name) is None:
        raise ModelError(
            f"names the function '{name}', which the graph's library does not hold"
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
