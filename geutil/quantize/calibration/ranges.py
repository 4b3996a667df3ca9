"""The ranges of a graph: read from variables, given, measured, frozen.

Some ops join their inputs in one range. A concat of boxes in pixels and of scores from
0 to 1 has a range from 0 to 640, say. In 8 bits its steps are 2.5, and all scores are
stored as 0: `JoinedInputs` tells how much of the range each input takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import Words
from geutil.graph import creation, functions, replicas
from geutil.graph.types import Graph, MutableIdentityMap, Operation, Tensor
from geutil.quantize.fake_quants import LEARNT
from geutil.quantize.partial_copy import PartialCopy, Replace
from geutil.quantize.planning import int8_kernels, network
from geutil.quantize.planning.int8_kernels import FAKE_QUANT, KERNELS, Treatment
from geutil.quantize.spec import Format, Range, block_of, levels, nudged, step
from geutil.select.networks.layers import Origins, scalar_value

Array = np.ndarray[Any, Any]
Measure = Callable[[str, Sequence[Tensor]], Mapping[str, Tensor]]


class Probe:
    """A function that measures tensors of a network that is not quantized."""

    # `replace`: tells what stands in for an op; what is quantized for what simulates
    # that, if nothing else is said.

    def __init__(
        self,
        graph: Graph,
        inputs: Mapping[str, Tensor],
        groups: Mapping[str, Sequence[Tensor]],
        measure: Measure,
        replace: Replace | None = None,
        results: Sequence[Tensor] = (),
    ) -> None:
        copy = PartialCopy(graph, inputs, replace or unquantized)
        tensors = [*results, *(t for group in groups.values() for t in group)]
        copies = iter(copy.of(tensors))
        outputs: dict[str, Tensor] = {}
        with creation.neutral(copy.graph):
            for index in range(len(results)):
                # No name holds a line break, so `run` can tell group and key apart.
                outputs[f"\n{index}"] = tf.identity(next(copies))
            for name, group in groups.items():
                measured = measure(name, [next(copies) for _ in group])
                for key, tensor in measured.items():
                    outputs[f"{name}\n{key}"] = tf.identity(tensor)
        self._function = functions.build_function(
            copy.graph, copy.inputs, outputs, [], []
        )

    def run(
        self, sample: Mapping[str, Any], *, optimized: bool = True
    ) -> dict[str, dict[str, Array]]:
        """Return the measurements of each group on a sample."""
        # Results, under "", have their places as keys, in that order.
        # Groups that lie in a branch of version 1 which is not taken are left out.
        values_by_group: dict[str, dict[str, Array]] = {}
        found = functions.call_function(self._function, sample, optimized=optimized)
        # A function returns them by name: "10" before "2".
        in_order = sorted(found.items(), key=lambda item: len(item[0]))
        for name, value in in_order:
            group, _, key = name.partition("\n")
            values_by_group.setdefault(group, {})[key] = value.numpy()
        # TensorFlow returns nothing at all for what did not run.
        return {
            group: values
            for group, values in values_by_group.items()
            if not group or all(value.size for value in values.values())
        }


def unquantized(op: Operation) -> Tensor | None:
    """Return the exact tensor that an op simulates the quantization of, or None."""
    if op.type in int8_kernels.FAKE_QUANT:
        return op.inputs[0]
    exact = network.delayed_input(op)
    return network.uncorrected_input(op) if exact is None else exact


_ENDS = "/min"


@dataclass(eq=False)
class RangeSite:
    """A range, and the FakeQuant ops that read it."""

    name: str
    low: Any  # the handle of the variable that holds its low end
    high: Any
    form: Format  # how values are stored
    is_weights: bool  # whether it is the range of weights
    ops: list[Operation] = field(default_factory=list)
    # The variable that counts its moving average in training, if there is one.
    learnt: Any = None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are quantized."""
        return [op.inputs[0] for op in self.ops]

    def read(self) -> Range:
        """Return the range as it is."""
        low, high = (
            tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32).numpy()
            for handle in (self.low, self.high)
        )
        return Range(low, high)

    def set(self, ends: Range) -> None:
        """Set the range."""
        for handle, value in zip((self.low, self.high), ends, strict=True):
            replicas.assign(handle, value)
        if self.learnt is not None:
            # Else the next step of training would begin anew.
            replicas.whole(self.learnt).assign(1.0)


def find_sites(graph: Graph, variables: Mapping[str, Any]) -> list[RangeSite]:
    """Return the ranges that FakeQuant ops of a FuncGraph read from variables."""
    outside = MutableIdentityMap(
        (inside, ext) for ext, inside in functions.bindings(graph)
    )
    names = {id(replicas.first_copy(v).handle): name for name, v in variables.items()}
    origins = Origins(graph)
    site_by_handle: dict[int, RangeSite] = {}
    for op in network.live_simulations(graph):
        # FakeQuantWithMinMaxArgs has its range in attributes, and nothing sets it.
        if len(op.inputs) != 3:
            continue
        low, high = (outside.get(variable_behind(t)) for t in op.inputs[1:])
        if low is None or high is None:
            continue
        site = site_by_handle.get(id(low))
        if site is None:
            name = names.get(id(low), op.name).removesuffix(_ENDS)
            is_weights = origins.is_parameter(op.inputs[0])
            site = RangeSite(name, low, high, format_of_simulation(op), is_weights)
            site.learnt = variables.get(f"{name}/{LEARNT}")
            site_by_handle[id(low)] = site
        site.ops.append(op)
    return list(site_by_handle.values())


@dataclass(frozen=True)
class Follower:
    """A range that another one tells, since its op makes no values between levels."""

    source: str  # the name of the range of what the op reads
    # The number that the op multiplies by; None if it cuts values off at 0.
    factor: float | None
    form: Format  # how both are stored

    def ends(self, source: Range) -> Range:
        """Return the range in which each level of the source is a level, too."""
        # A cut at 0 keeps the steps and begins at 0, where its kernel changes steps and
        # does no more.
        # Where 0 is a level: turned around, another one may be nearest.
        nudged_ends = nudged(*source, self.form.bits, self.form.narrow_range)
        low, high = (float(end) for end in nudged_ends)
        if self.factor is not None:
            return Range(*sorted((low * self.factor, high * self.factor)))
        return source if self.form.symmetric else Range(0.0, high - low)


def find_followers(sites: Sequence[RangeSite]) -> dict[str, Follower]:
    """Return the ranges that others tell, by name, in the order of the graph."""
    # Those of Relus that are kernels of their own, and of products with a number. Finer
    # steps would tell no more of values that are on levels, and make several steps of
    # one that the kernel before is off.
    site_by_op = {op: site for site in sites for op in site.ops}
    site_by_name = {site.name: site for site in sites}
    found: dict[str, Follower] = {}
    for site in sites:
        readers = (r for op in site.ops for r in op.outputs[0].consumers())
        if any(reader.type in int8_kernels.COMPARISONS for reader in readers):
            # A comparison with the source would hang on the last bit of a float.
            continue
        (follower, *others) = {_followed(t.op, site_by_op) for t in site.tensors}
        if follower is not None and not others:
            source = site_by_name[follower.source]
            if source is not site and source.form == site.form:
                found[site.name] = follower
    return found


def _followed(
    op: Operation, site_by_op: Mapping[Operation, RangeSite]
) -> Follower | None:
    """Return the follower for an op's result; None if its range is its own."""
    cuts = op.type in int8_kernels.FUSED_ACTIVATIONS
    for slot in (0,) if cuts else _DATA.get(op.type, ()):
        source = site_by_op.get(network.forwarded_from(op.inputs[slot]).op)
        if source is None:
            continue
        if cuts:
            return Follower(source.name, None, source.form)
        other = op.inputs[1 - slot]
        exact = unquantized(other.op)
        factor = scalar_value(other if exact is None else exact)
        # Times 0, the range would be empty.
        if factor:
            inverse = op.type == "RealDiv"
            number = 1.0 / factor if inverse else factor
            return Follower(source.name, number, source.form)
    return None


_DATA = {"Mul": (0, 1), "RealDiv": (0,)}
"""By type of op the inputs that may be multiplied by a number, which is the other."""


def simulated_ends(op: Operation, values: Mapping[Operation, Array]) -> Range:
    """Return the ends that a FakeQuant op reads, some of them known by `values`."""
    if len(op.inputs) == 1:
        return Range(op.get_attr("min"), op.get_attr("max"))
    ends = list(op.inputs)[1:]
    return Range(*(values.get(t.op, tf.get_static_value(t)) for t in ends))


def format_of_simulation(op: Operation) -> Format:
    """Return the format that a FakeQuant op simulates."""
    narrow = bool(op.get_attr("narrow_range"))
    # The op knows the last axis alone; what it reads was reshaped to have it there.
    axes = (op.inputs[0].shape.rank - 1,) if op.type.endswith("PerChannel") else ()
    return Format(int(op.get_attr("num_bits")), narrow, narrow, axes, block_of(op))


def variable_behind(end: Tensor) -> Tensor | None:
    """Return the handle of the variable that an end of a range is in."""
    op = end.op
    if op.type == "ReadVariableOp":
        return op.inputs[0]
    # In training: an Identity of what was assigned just before.
    for waited in op.control_inputs:
        if waited.type == "AssignVariableOp" and waited.inputs[1] is op.inputs[0]:
            return waited.inputs[0]
    return None


def range_values(graph: Graph) -> dict[Operation, Array]:
    """Return the values of ranges, by the ops that FakeQuant ops read them from."""
    ends = [
        end
        for op in graph.get_operations()
        if op.type in int8_kernels.FAKE_QUANT
        for end in list(op.inputs)[1:]
    ]
    return _values(graph, ends)


def variable_values(graph: Graph) -> dict[Operation, Array]:
    """Return the values of variables, by the ops that read them."""
    ops = graph.get_operations()
    return _values(graph, [op.outputs[0] for op in ops if op.type == "ReadVariableOp"])


def frozen(values: Mapping[Operation, Array]) -> Replace:
    """Return a replacement of ops by values, which leaves delays out."""

    def replace(op: Operation) -> Tensor | Array | None:
        value = values.get(op)
        if value is not None:
            return value
        return None if network.delayed_input(op) is None else op.inputs[1]

    return replace


def _values(graph: Graph, reads: list[Tensor]) -> dict[Operation, Array]:
    outside = MutableIdentityMap(
        (inside, ext) for ext, inside in functions.bindings(graph)
    )
    value_by_op: dict[Operation, Array] = {}
    for read in reads:
        inside = variable_behind(read)
        handle = None if inside is None else outside.get(inside)
        if handle is not None and read.op not in value_by_op:
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=read.dtype)
            value_by_op[read.op] = np.asarray(value.numpy())
    return value_by_op


_FEWEST = 16
"""An input with fewer steps of the common range has lost four of eight bits."""


@dataclass(frozen=True)
class NarrowInput:
    """An input that gets few steps of the range that it shares with other inputs.

    Attributes:
        op: the op, by name.
        op_type: its type.
        input: the op that computes the input, by name.
        steps: the number of steps that its values span.
        of: the number of steps of the range.
        ops: all ops that join inputs in this range, including `op`.
    """

    op: str
    op_type: str
    input: str
    steps: float
    of: int
    ops: tuple[str, ...]

    def __str__(self) -> str:
        others = " and ".join(f"'{name}'" for name in self.ops if name != self.op)
        too = f", and the same for {others}, which share the range" if others else ""
        skip = Words(f"overrides={{'{self.op}': 'skip'}}", f"'{self.op}'")
        return (
            f"'{self.input}' gets {self.steps:.3g} of {self.of} steps of the range in "
            f"which '{self.op}' ({self.op_type}) joins it; make it an output of its "
            f"own, or quantize with {skip}{too}"
        )


@dataclass(frozen=True, eq=False)
class JoinedPart:
    """An input of a concat or a stack, and where it lies in the result."""

    name: str  # the op that makes it, by name
    axis: int  # the axis along which parts are joined
    start: int
    stop: int

    def of(self, values: Array) -> Array:
        """Return its share of the values of the result."""
        return values[(*(slice(None),) * self.axis, slice(self.start, self.stop))]


def parts_of(tensor: Tensor) -> tuple[JoinedPart, ...]:
    """Return the parts that a tensor is joined of; none if it is no concat or stack."""
    result = _exact(tensor)
    op, rank = result.op, result.shape.rank
    if op.type == "ConcatV2":
        (*inputs, end), sizes = op.inputs, None
        axis = tf.get_static_value(end)
    elif op.type == "Pack":
        inputs, axis = list(op.inputs), op.get_attr("axis")
        sizes = [1] * len(inputs)
    else:
        return ()
    if rank is None or axis is None:
        return ()
    place = int(axis) % rank
    sizes = sizes or [t.shape[place] for t in inputs]
    if len(inputs) < 2 or None in sizes:
        return ()
    ends = np.cumsum([0, *sizes]).tolist()
    return tuple(
        JoinedPart(_exact(t).op.name, place, start, stop)
        for t, start, stop in zip(inputs, ends, ends[1:], strict=False)
    )


def are_uneven(widths: Sequence[float]) -> bool:
    """Return whether some parts are so narrow that one range stores them badly."""
    return len(widths) > 1 and max(widths) > _FEWEST * min(widths)


def same_values(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor, and those that it is in steps or as it is, the exact one last."""
    yield tensor
    while tensor.op.type in ("Identity", *FAKE_QUANT):
        tensor = tensor.op.inputs[0]
        yield tensor


def _exact(tensor: Tensor) -> Tensor:
    return [*same_values(tensor)][-1]


class JoinedInputs:
    """The inputs that the ops of a model join, and the values that they have."""

    def __init__(self, ops: Iterable[Operation], sites: Sequence[RangeSite]) -> None:
        site_by_op = {op: site for site in sites for op in site.ops}
        self._joins: list[tuple[Operation, RangeSite, dict[str, Tensor]]] = []
        self._widths: dict[str, tuple[float, float]] = {}
        for op in ops:
            kernel = KERNELS.get(op.type)
            if kernel is None or kernel.treatment is not Treatment.JOINS:
                continue
            readers = op.outputs[0].consumers()
            found = [site_by_op[r] for r in readers if r in site_by_op]
            inputs = {
                f"{op.name}:{slot}": op.inputs[slot]
                for slot in kernel.data_inputs(op)
                if op.inputs[slot].dtype.is_floating
                # A number, such as the one of a maximum, is no values to tell apart.
                and op.inputs[slot].shape.num_elements() != 1
            }
            if found and len(inputs) > 1:
                self._joins.append((op, found[0], inputs))
        # The inputs, each by a name that no range has.
        self.groups = {
            n: [t] for _, _, inputs in self._joins for n, t in inputs.items()
        }

    def add(self, seen: Mapping[str, Mapping[str, Array]]) -> None:
        """Take in the smallest and the largest values of a batch, by group."""
        for name in self.groups:
            if name in seen:
                low, high = self._widths.get(name, (0.0, 0.0))
                values = seen[name]
                self._widths[name] = (
                    min(low, float(values["low"])),
                    max(high, float(values["high"])),
                )

    def narrow(self, ranges: Mapping[str, Range]) -> tuple[NarrowInput, ...]:
        """Return the inputs that get few steps, where another one gets more."""
        found = []
        ops_by_range: dict[str, list[str]] = {}
        for op, site, _ in self._joins:
            ops_by_range.setdefault(site.name, []).append(op.name)
        for op, site, inputs in self._joins:
            bits, narrow = site.form.bits, site.form.narrow_range
            size = float(step(*ranges[site.name], bits, narrow))
            steps = {
                name: (high - low) / size
                for name in inputs
                for low, high in [self._widths.get(name, (0.0, 0.0))]
            }
            # Where all are narrow, none gets more steps than another.
            if max(steps.values()) < _FEWEST:
                continue
            found += [
                NarrowInput(
                    op.name,
                    op.type,
                    _exact(inputs[name]).op.name,
                    count,
                    levels(bits, narrow) - 1,
                    tuple(ops_by_range[site.name]),
                )
                for name, count in steps.items()
                # An input that is always 0 needs no steps.
                if 0.0 < count < _FEWEST
            ]
        return tuple(found)
