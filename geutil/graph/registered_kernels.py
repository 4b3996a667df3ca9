"""The kernels that TensorFlow registers: the devices an op runs on, and host memory.

TensorFlow's wheels for Linux register the kernels of GPUs whether there is one or not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from geutil.graph._tf import get_op_def, get_registered_kernels_for_op
from geutil.graph.types import Operation

_ANY_DEVICE = "DEFAULT"


@dataclass(frozen=True)
class RegisteredKernel:
    """The kernel of an op on a type of device."""

    # The inputs, by place, that it reads in the memory of the host.
    host_inputs: frozenset[int]
    host_outputs: frozenset[int]  # The outputs that it makes there.


def has_kernels(device_type: str) -> bool:
    """Tell whether this TensorFlow was built for a type of device, such as "GPU"."""
    return any(k.device_type == device_type for k in _registered("MatMul"))


def kernel_of(op: Operation, device_type: str) -> RegisteredKernel | None:
    """Return the kernel of an op on "CPU" or "GPU", None if it has none there."""
    # An op without any kernel, such as one that is named for a function, has an empty
    # one.
    kernels = _registered(op.type)
    if not kernels:
        return RegisteredKernel(frozenset(), frozenset())
    found = None
    for kernel in kernels:
        if kernel.device_type not in (device_type, _ANY_DEVICE):
            continue
        if all(c.admits(op) for c in kernel.constraints):
            found = kernel
            if kernel.device_type == device_type:
                break
    if found is None:
        return None
    if not found.host_args:
        return RegisteredKernel(frozenset(), frozenset())
    definition = get_op_def(op.type)
    return RegisteredKernel(
        _places(op, definition.input_arg, found.host_args),
        _places(op, definition.output_arg, found.host_args),
    )


@dataclass(frozen=True)
class _Constraint:
    """The types that an attribute may have, as numbers."""

    name: str
    allowed: frozenset[int]

    def admits(self, op: Operation) -> bool:
        """Tell whether an op's attribute is one of the types, or only such."""
        value = op.get_attr(self.name)
        types = value if isinstance(value, list) else [value]
        return all(dtype.as_datatype_enum in self.allowed for dtype in types)


@dataclass(frozen=True)
class _Registration:
    """A kernel, as TensorFlow registers it."""

    device_type: str
    constraints: tuple[_Constraint, ...]
    host_args: frozenset[str]


@functools.cache
def _registered(op_type: str) -> tuple[_Registration, ...]:
    """Return the kernels of an op type, those of highest priority first."""
    listed = get_registered_kernels_for_op(op_type).kernel
    return tuple(
        _Registration(
            kernel.device_type,
            tuple(
                _Constraint(c.name, frozenset(c.allowed_values.list.type))
                for c in kernel.constraint
                if c.allowed_values.list.type
            ),
            frozenset(kernel.host_memory_arg),
        )
        for kernel in sorted(listed, key=lambda kernel: -kernel.priority)
    )


def _places(
    op: Operation, args: Iterable[Any], named: frozenset[str]
) -> frozenset[int]:
    """Return the places of named arguments, each of one tensor or of several."""
    places: list[int] = []
    begin = 0
    for arg in args:
        count = 1
        if arg.number_attr:
            count = op.get_attr(arg.number_attr)
        elif arg.type_list_attr:
            count = len(op.get_attr(arg.type_list_attr))
        if arg.name in named:
            places += range(begin, begin + count)
        begin += count
    return frozenset(places)
