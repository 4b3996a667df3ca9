"""Placement: the devices that TensorFlow runs the ops of a step on, by its rules.

A Session merges an op's device string with those of the ops that share a resource or
are colocated with it. An op without a device then runs on the first task's GPU or CPU,
but for ops that go with others: those that make one tensor of nothing go with their
readers, and those that read only a shape with their inputs. Ops that have no kernel for
a GPU go to the CPU beside it, with all ops that must be where they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from geutil.errors import ArgumentTypeError
from geutil.graph import adjacency, state
from geutil.graph._tf import get_op_def, get_registered_kernels_for_op
from geutil.graph.protos import AttrValue
from geutil.graph.types import Graph, Operation
from geutil.graph.walks import DisjointSets

_ANY_DEVICE = "DEFAULT"


# TensorFlow's wheels for Linux register the kernels of GPUs, present or not.
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


LOCALHOST = "localhost"
"""The job of a process that is in no cluster."""
_PARAMETERS = "ps"
_READS_A_SHAPE = frozenset(("Rank", "Shape", "Size"))
Task = tuple[str, int]


@functools.cache
def _spec(device: str) -> tf.DeviceSpec:
    return tf.DeviceSpec.from_string(device)


def tasks_of(devices: Iterable[str]) -> list[Task]:
    """Return the tasks of a cluster that devices name, parameter servers last.

    The first one is that of ops without a device. "/job:worker" is its task 0.

    Example:
        >>> tasks_of(["/job:ps/task:0", "", "/job:worker/task:1", "/device:CPU:1"])
        [('worker', 1), ('ps', 0)]
    """
    specs = [_spec(device) for device in dict.fromkeys(devices)]
    tasks = {(s.job, s.task or 0) for s in specs if s.job not in (None, LOCALHOST)}
    return sorted(tasks, key=lambda task: (task[0] == _PARAMETERS, task))


def full_name(device: str, default: str) -> str:
    """Return a device by its full name, parts that it leaves open as in another one.

    Example:
        >>> full_name("/task:1", "/job:worker/replica:0/task:0/device:CPU:0")
        '/job:worker/replica:0/task:1/device:CPU:0'
    """
    return str(_spec(default).make_merged_spec(_spec(device)).to_string())


def default_device(devices: Iterable[str]) -> str:
    """Return the full name of the device of ops that name none, by those of others."""
    job, task = next(iter(tasks_of(devices)), (LOCALHOST, 0))
    has_gpu = job == LOCALHOST and tf.config.get_visible_devices("GPU")
    kind = "GPU" if has_gpu else "CPU"
    return f"/job:{job}/replica:0/task:{task}/device:{kind}:0"


def checked_default(device: str | None, devices: Iterable[str]) -> str:
    """Return the full name of the device of ops that name none, if it is a device."""
    default = default_device(devices)
    if device is None:
        return default
    try:
        name = full_name(device, default)
        if (_spec(name).device_index or 0) < 0:
            raise ValueError(name)
    except (TypeError, ValueError, AttributeError) as error:
        raise ArgumentTypeError(
            f"{device!r} is no device; pass one like 'GPU:0' or '/job:worker/task:0'"
        ) from error
    return name


def kind_of(device: str | None) -> str:
    """Return "CPU" or "GPU", of None that of the device of ops that name none.

    Raises ArgumentTypeError for a string that is no device.

    Example:
        >>> kind_of("/device:GPU:0"), kind_of("GPU:1"), kind_of("CPU:0")
        ('GPU', 'GPU', 'CPU')
    """
    return str(_spec(checked_default(device, ())).device_type)


class _Planned:
    """The device that the steps of a graph are planned for, if one was named."""

    device: str | None = None


def plan_for(graph: Graph, device: str | None) -> None:
    """Note the device that the steps of a graph are planned for, if one is named."""
    if device is not None:
        state.slot(graph, _Planned).device = device


@contextmanager
def planning_for(graph: Graph, device: str | None) -> Iterator[None]:
    """Plan steps of a graph for a device, unless the block raises."""
    earlier = planned_for(graph)
    plan_for(graph, device)
    try:
        yield
    except BaseException:
        state.slot(graph, _Planned).device = earlier
        raise


def planned_for(graph: Graph) -> str | None:
    """Return the device that a graph was planned for; None if none was named."""
    return state.slot(graph, _Planned).device


def share_memory(one: str, other: str) -> bool:
    """Tell whether devices, by full names, share memory, as CPUs of a process do."""
    specs = _spec(one), _spec(other)
    tasks = {(spec.job, spec.replica, spec.task) for spec in specs}
    return len(tasks) == 1 and all(spec.device_type == "CPU" for spec in specs)


def places_of(
    ops: Sequence[Operation], fed: Collection[Operation], default: str
) -> dict[str, str]:
    """Return the device of each op by its name, as a Session places them."""
    # Fed outputs come in at `default`, the full name of the device of ops that name
    # none.
    named = {full_name(device, default) for device in {op.device for op in ops}}
    if len(named) <= 1 and all(kind_of(device) == "CPU" for device in named):
        (device,) = named or {default}
        places = dict.fromkeys((op.name for op in ops), device)
    else:
        places = _merged(ops, default)
    return places | dict.fromkeys((op.name for op in fed), default)


def _merged(ops: Sequence[Operation], default: str) -> dict[str, str]:
    """Return the devices by the rules of TensorFlow's placer."""
    group_of = _groups(ops)
    members: dict[str, list[Operation]] = {}
    for op in ops:
        members.setdefault(group_of[op.name], []).append(op)
    places: dict[str, str] = {}
    makers: list[Operation] = []
    for group in members.values():
        spec = _spec(group[0].device)
        for other in group[1:]:
            # The first op decides: it is the one that makes a variable.
            spec = _spec(other.device).make_merged_spec(spec)
        device = _with_kernels(full_name(str(spec.to_string()), default), group)
        places |= dict.fromkeys((op.name for op in group), device)
    for op in ops:
        if len(members[group_of[op.name]]) > 1 or op.device:
            continue
        if op.type in _READS_A_SHAPE:
            places[op.name] = places.get(op.inputs[0].op.name, places[op.name])
        elif not op.inputs and len(op.outputs) == 1:
            makers.append(op)
    readers: dict[str, list[str]] = {}
    for op in ops:
        for before in (*(t.op for t in op.inputs), *op.control_inputs):
            readers.setdefault(before.name, []).append(op.name)
    for op in makers:
        found = {places[reader] for reader in readers.get(op.name, ())}
        if len(found) == 1:
            places[op.name] = found.pop()
    return places


def _with_kernels(device: str, group: Iterable[Operation]) -> str:
    """Return a device, or the CPU beside it if an op of a group has no kernel there."""
    kind = _spec(device).device_type
    if kind == "CPU" or all(kernel_of(op, kind) for op in group):
        return device
    return str(_spec(device).replace(device_type="CPU", device_index=0).to_string())


def _groups(ops: Sequence[Operation]) -> dict[str, str]:
    """Return the group of each op: those that must be on one device."""
    names = {op.name for op in ops}
    groups = DisjointSets(names)
    for op in ops:
        tied = [
            tensor.op.name
            for i, tensor in enumerate(op.inputs)
            if tensor.dtype == tf.resource or adjacency.takes_reference(op, i)
        ]
        tied += colocation_names(op)
        for other in tied:
            if other in names:
                groups.join(op.name, other)
    return {op.name: groups.leader(op.name) for op in ops}


COLOCATION = "_class"
_COLOCATED = b"loc:@"
"""An op names those that it shall share a device with in its `_class` attribute, behind
this prefix; other entries of that attribute are kept as they are."""


def class_entries(op: Operation) -> list[bytes]:
    """Return the entries of the `_class` attribute; [] when there is none."""
    try:
        return list(op.get_attr(COLOCATION))
    except ValueError:
        return []


def colocation_names(op: Operation) -> list[str]:
    """Return the names of the ops that `op` is colocated with."""
    return [
        entry.removeprefix(_COLOCATED).decode()
        for entry in class_entries(op)
        if entry.startswith(_COLOCATED)
    ]


def rename_entries(
    entries: Iterable[bytes], rename: Callable[[str], str | None]
) -> list[bytes]:
    """Return `entries` with each colocation name renamed, or dropped for None."""
    renamed = []
    for entry in entries:
        # `_class` may have other entries, which stay.
        if not entry.startswith(_COLOCATED):
            renamed.append(entry)
            continue
        name = rename(entry.removeprefix(_COLOCATED).decode())
        if name is not None:
            renamed.append(_COLOCATED + name.encode())
    return renamed


def drop_missing_colocation(op: Operation) -> None:
    """Let `op` no longer be colocated with ops that its graph does not have."""
    entries = class_entries(op)
    if not entries:
        return
    remaining_entries = rename_entries(
        entries, lambda n: n if _has_op(op.graph, n) else None
    )
    if remaining_entries != entries:
        set_class_entries(op, remaining_entries)


def _has_op(graph: Graph, name: str) -> bool:
    try:
        graph.get_operation_by_name(name)
    except KeyError:
        return False
    return True


def set_class_entries(op: Operation, entries: Iterable[bytes]) -> None:
    """Set the `_class` attribute of `op`."""
    value = AttrValue(list=AttrValue.ListValue(s=list(entries)))
    op._set_attr(COLOCATION, value)
