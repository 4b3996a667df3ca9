"""The ranges of a graph: read from variables, derived from others, measured, frozen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.graph import creation, functions, strategy_variables
from geutil.graph.types import Graph, MutableIdentityMap, Operation, Tensor
from geutil.quantize.blocks import block_of
from geutil.quantize.partial_copy import PartialCopy, Replace
from geutil.quantize.planning import int8_kernels, network
from geutil.quantize.range_variables import LEARNT
from geutil.quantize.spec import Format, Range, nudged
from geutil.select.networks.provenance import Origins, scalar_value

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
            strategy_variables.assign(handle, value)
        if self.learnt is not None:
            # Else the next step of training would begin anew.
            strategy_variables.whole(self.learnt).assign(1.0)


def find_sites(graph: Graph, variables: Mapping[str, Any]) -> list[RangeSite]:
    """Return the ranges that FakeQuant ops of a FuncGraph read from variables."""
    outside = MutableIdentityMap(
        (inside, ext) for ext, inside in functions.bindings(graph)
    )
    names = {
        id(strategy_variables.first_copy(v).handle): name
        for name, v in variables.items()
    }
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
