"""The form of a program at inference; the options of stripping, and its report.

Switches between training and inference are constants, and the branches that no
constant selects are gone; batch norms read moving averages. The updates tell which
variables these are: an assignment that moves a variable towards the very mean or
variance that the norm uses. Names play no part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import tensorflow as tf

from geutil.errors import ModelError, Words
from geutil.graph import adjacency, creation
from geutil.graph.protos import functions_of_attributes
from geutil.graph.types import MutableIdentityMap, Operation, Tensor
from geutil.graph.walks import node_name, short_name, tensor_name
from geutil.lazy import Shown
from geutil.model.programs import ModelProgram, nodes_by_name
from geutil.model.to_graph import (
    GraphParts,
    keep_of,
    live_ops,
    materialize,
    program_of_parts,
)
from geutil.reroute.tensors import reroute_ts
from geutil.rewrite import Any as AnyTensor
from geutil.rewrite import Const, Match, Op, Rule, constant_value, rewrite
from geutil.rewrite.rules import constant_folding, dead_branch_folding
from geutil.rewrite.rules.constant_folding import is_true
from geutil.select.networks import batch_norms
from geutil.select.networks.batch_norms import SHAPING, BatchMoments, MovingVariable
from geutil.select.walks import get_forward_walk_ops

Action: TypeAlias = Literal["removed", "turned", "kept"]
# Entries of a printed report; the rest is counted.
_SHOWN = 20


@dataclass(frozen=True)
class Stripped:
    """One part of a model that serves training, and the action taken.

    Attributes:
        action: "removed"; "turned" into its inference form; or "kept".
        kind: "switch", "dropout", "noise", "random", "batch norm", "diagnostic", "side
            effect", "input", "variable" or "body".
        name: the op, input or variable.
        reason: the reason for the action.
        keras_layer: the path of the Keras layer that it is in; "" if there is none.

    Example:
        >>> from geutil.model import Stripped
        >>> print(Stripped("removed", "dropout", "drop/Mul", "its input passes"))
        removed dropout 'drop/Mul': its input passes
    """

    action: Action
    kind: str
    name: str
    reason: str
    keras_layer: str = ""

    def __str__(self) -> str:
        layer = f" of layer '{self.keras_layer}'" if self.keras_layer else ""
        return f"{self.action} {self.kind} '{self.name}'{layer}: {self.reason}"


@dataclass(frozen=True)
class StripReport(Shown):
    """The changes and omissions of `Model.strip_training`, each with the reason.

    Attributes:
        entries: one for each candidate, in the order of the decisions.
        dropped_ops: the names of the ops that are not in the result, in graph order.

    Example:
        >>> from geutil.model import StripReport
        >>> print(StripReport())
        nothing to strip
    """

    entries: tuple[Stripped, ...] = ()
    dropped_ops: tuple[str, ...] = ()

    @property
    def removed(self) -> tuple[Stripped, ...]:
        """The parts that were removed."""
        return self._by("removed")

    @property
    def turned(self) -> tuple[Stripped, ...]:
        """The parts that were replaced by their inference form."""
        return self._by("turned")

    @property
    def kept(self) -> tuple[Stripped, ...]:
        """The candidates that were kept."""
        return self._by("kept")

    def _by(self, action: Action) -> tuple[Stripped, ...]:
        return tuple(entry for entry in self.entries if entry.action == action)

    def __bool__(self) -> bool:
        """Return whether anything was removed or turned."""
        return bool(self.removed or self.turned)

    def __str__(self) -> str:
        title = (
            f"{len(self.removed)} removed, {len(self.turned)} turned, "
            f"{len(self.kept)} kept; {len(self.dropped_ops)} ops dropped"
        )
        lines = [title if self else "nothing to strip"]
        for group in (self.removed, self.turned, self.kept):
            lines += [f"  {entry}" for entry in group[:_SHOWN]]
            if len(group) > _SHOWN:
                rest = len(group) - _SHOWN
                lines.append(f"  and {rest} more, in .{group[0].action}")
        return "\n".join(lines)


@dataclass(frozen=True)
class StripOptions:
    """The caller's choices, which the graph does not tell."""

    # The value for each input or placeholder that is to be a constant.
    switches: Mapping[str, Any] = field(default_factory=dict)
    # For batch norms the variables of their moving mean and variance.
    statistics: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    keep: tuple[str, ...] = ()  # Ops and name scopes that stay as they are.
    # For ops their value at inference; None is that of an input.
    neutral: Mapping[str, Any] = field(default_factory=dict)

    def keeps(self, name: str) -> bool:
        """Return whether an op of that name stays as it is."""
        return any(name == scope or name.startswith(f"{scope}/") for scope in self.keep)


KNOWN = frozenset(
    (
        "is_train",
        "is_training",
        "istraining",
        "keras_learning_phase",
        "learning_phase",
        "phase_train",
        "train_mode",
        "train_phase",
        "training",
        "training_mode",
    )
)
"""Default names of training switches."""
_PLACEHOLDERS = frozenset(("Placeholder", "PlaceholderV2", "PlaceholderWithDefault"))


@dataclass(frozen=True)
class Switches:
    """The switches of a program."""

    nodes: list[str]  # The names of the nodes that are constants now.
    entries: list[Stripped]


def set_switches(program: ModelProgram, options: StripOptions) -> Switches:
    """Make switches of a program constants; return them and inputs that may be."""
    nodes = nodes_by_name(program.graph_def)
    values = _named(program, nodes, options.switches)
    entries = []
    for node in program.graph_def.node:
        if node.op not in _PLACEHOLDERS or tensor_name(node.name) in program.captures:
            continue
        if not _may_switch(node) or node.name in values:
            continue
        name = _input_of(program, node.name) or node.name
        # An input of another name may be data, and is only told.
        if not (_is_known(name) or _is_known(node.name)):
            if name in program.inputs:
                reason = f"pass switches={{'{name}': False}} if it selects training"
                entries.append(Stripped("kept", "switch", name, reason))
        elif options.keeps(node.name):
            entries.append(Stripped("kept", "switch", name, "it is in keep"))
        else:
            values[node.name] = (name, False)
    for placeholder, (name, value) in values.items():
        node = nodes[placeholder]
        _set(node, name, value)
        program.inputs.pop(name, None)
        entries.append(Stripped("removed", "switch", name, f"it is {value} from now"))
    return Switches(list(values), entries)


def _named(
    program: ModelProgram, nodes: Mapping[str, Any], switches: Mapping[str, Any]
) -> dict[str, tuple[str, Any]]:
    """Return for the node of each switch that the caller names its name and value."""
    values = {}
    for name, value in switches.items():
        node = node_name(program.inputs.get(name, name))
        if node not in nodes or nodes[node].op not in _PLACEHOLDERS:
            names = [n for n in nodes if nodes[n].op in _PLACEHOLDERS]
            raise ModelError(
                f"there is no input or placeholder '{name}' to switch; there are "
                f"{[*program.inputs, *(n for n in names if n not in program.inputs)]}"
            )
        values[node] = (_input_of(program, node) or name, value)
    return values


def _input_of(program: ModelProgram, node: str) -> str | None:
    for name, tensor in program.inputs.items():
        if node_name(tensor) == node:
            return name
    return None


def _is_known(name: str) -> bool:
    return name.rpartition("/")[2].rstrip("_0123456789").lower() in KNOWN


def _may_switch(node: Any) -> bool:
    """Return whether a placeholder holds one truth value; unknown shapes may be one."""
    shape = node.attr["shape"].shape
    return node.attr["dtype"].type == tf.bool.as_datatype_enum and not shape.dim


def _set(node: Any, name: str, value: Any) -> None:
    """Turn the placeholder of a switch into a constant."""
    dtype = tf.as_dtype(node.attr["dtype"].type)
    shape = tf.TensorShape(node.attr["shape"].shape)
    try:
        array = np.asarray(value, dtype.as_numpy_dtype)
    except (TypeError, ValueError) as error:
        raise ModelError(f"switch '{name}' is {dtype.name}, got {value!r}") from error
    if not shape.is_compatible_with(array.shape):
        if array.ndim or not shape.is_fully_defined():
            raise ModelError(f"switch '{name}' has shape {shape}, got {value!r}")
        # A scalar switches all elements.
        array = np.broadcast_to(array, shape.as_list())
    node.op = "Const"
    node.ClearField("attr")
    del node.input[:]
    node.attr["dtype"].type = dtype.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(array, dtype))


_SCALAR = 8
"""Bytes of the largest values that are folded: predicates are scalars."""
_CALLS = {"If": "StatefulPartitionedCall", "StatelessIf": "PartitionedCall"}
_CASES = {"Case": "StatefulPartitionedCall", "StatelessCase": "PartitionedCall"}


def folded(program: ModelProgram, switches: Iterable[str], what: str) -> ModelProgram:
    """Return a program without the branches that constants rule out."""
    # Predicates are folded, version 1 conditionals and selections by a scalar are
    # rewritten, and functional ones become calls of the branch that runs, which are
    # inlined; then there may be more predicates to fold, and so on inwards.
    rules = (constant_folding(max_bytes=_SCALAR), dead_branch_folding(), _selection())
    calls = set(_calls(program))
    deciding = set(switches)
    parts = materialize(program, inline=False, what=what)
    while True:
        seeds = [op for op in parts.graph.get_operations() if op.name in deciding]
        within = get_forward_walk_ops(seeds)
        report = rewrite(parts.graph, rules, ops=within, keep=keep_of(parts))
        deciding.update(name for done in report.rewritten for name in done.new_ops)
        program = program_of_parts(parts)
        _decide(program.graph_def)
        called = _calls(program)
        if called.keys() <= calls:
            return program
        keep = {f for name in calls & called.keys() for f in called[name]}
        parts = materialize(program, inline=True, keep=keep, what=what)
        program = program_of_parts(parts)
        # A call that could not be inlined stays.
        calls |= _calls(program).keys()


def _calls(program: ModelProgram) -> dict[str, list[str]]:
    """Return the functions that each call of a program calls."""
    return {
        node.name: list(functions_of_attributes(node.attr))
        for node in program.graph_def.node
        if node.op in ("PartitionedCall", "StatefulPartitionedCall")
    }


def _decide(graph_def: Any) -> None:
    """Make conditionals whose predicate is a constant calls of a branch, in place."""
    nodes = nodes_by_name(graph_def)
    for node in graph_def.node:
        if node.op not in _CALLS and node.op not in _CASES:
            continue
        value = _constant(nodes, node.input[0])
        if value is None:
            continue
        if node.op in _CALLS:
            branch = node.attr["then_branch" if is_true(value) else "else_branch"].func
            op = _CALLS[node.op]
        else:
            branches = node.attr["branches"].list.func
            index = int(value)
            # As the kernel does it: what is out of range is the last one.
            branch = branches[index if 0 <= index < len(branches) else -1]
            op = _CASES[node.op]
        _as_call(node, op, branch)


def _constant(nodes: Any, text: str) -> Any:
    node = nodes[node_name(text)]
    while node.op == "Identity":
        node = nodes[node_name(node.input[0])]
    return tf.make_ndarray(node.attr["value"].tensor) if node.op == "Const" else None


def _as_call(node: Any, op: str, branch: Any) -> None:
    call = type(node)(name=node.name, op=op, device=node.device, input=node.input[1:])
    for name in ("Tin", "Tout", "_output_shapes"):
        if name in node.attr:
            call.attr[name].CopyFrom(node.attr[name])
    call.attr["f"].func.CopyFrom(branch)
    node.CopyFrom(call)


def _selection() -> Rule:
    """Return the rule for a choice between tensors by one truth value."""
    pattern = Op(
        {"Select", "SelectV2"},
        Const("pred", where=lambda t: t.shape.rank == 0),
        AnyTensor("then"),
        AnyTensor("else"),
    )
    return Rule(pattern, _selected, name="selection")


def _selected(match: Match) -> Tensor:
    is_then = bool(constant_value(match["pred"]))
    chosen, other = match["then"], match["else"]
    if not is_then:
        chosen, other = other, chosen
    if match.root.type == "Select" or other.shape.rank == 0:
        return chosen
    if chosen.shape.is_fully_defined() and chosen.shape == match.root.outputs[0].shape:
        return chosen
    # The other one may have more elements, to which the chosen one is broadcast.
    shape = tf.broadcast_dynamic_shape(tf.shape(chosen), tf.shape(other))
    return tf.broadcast_to(chosen, shape)


@dataclass
class Turned:
    """The fate of the batch norms."""

    entries: list[Stripped] = field(default_factory=list)
    # The updates of moving averages of batch norms that were turned: for the name of
    # each the norm.
    updates: dict[str, str] = field(default_factory=dict)
    # Those of batch norms that were kept, likewise.
    kept_updates: dict[str, str] = field(default_factory=dict)
    # For the name of each fused batch norm the names of the tensors that are its mean
    # and variance now; the attributes of an op in a graph cannot change, so this is for
    # its program.
    fused: dict[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Source:
    """Where the value of a statistic at inference comes from."""

    name: str
    value: Tensor


def turn_batch_norms(
    parts: GraphParts, options: StripOptions, variable_names: Mapping[int, str]
) -> Turned:
    """Turn the batch norms of a graph to inference, in place."""
    live, norms = _norms(parts)
    averages = _by_statistic(batch_norms.moving_averages(parts.graph))
    turned = Turned()
    chosen: list[tuple[BatchMoments, _Source, _Source]] = []
    faults: list[str] = []
    for norm in norms:
        pair = (averages.get(norm.mean, []), averages.get(norm.variance, []))
        updates = {average.update.name: norm.name for side in pair for average in side}
        if options.keeps(norm.name):
            turned.entries.append(_kept(norm))
            turned.kept_updates |= updates
            continue
        sources = _sources(parts, norm, pair, options, variable_names)
        if isinstance(sources, str):
            faults.append(f"'{norm.name}': {sources}")
            continue
        chosen.append((norm, *sources))
        turned.entries.append(_turned(norm, *sources))
        turned.updates |= updates
    _check_names(options, norms)
    # With any fault nothing is redirected, and one message tells all faults.
    if not faults:
        _redirect_all(parts, chosen, live, turned)
        faults = _left(parts, options, turned, averages)
    if faults:
        statistics = Words(
            "pass statistics={name: (mean, variance)} with the names of their "
            "variables, or keep=[name]"
        )
        raise ModelError(
            "batch norms in training mode cannot be turned to inference: "
            f"{'; '.join(faults)}",
            remedy=f"{statistics} to leave them as they are",
        )
    return turned


def _left(
    parts: GraphParts,
    options: StripOptions,
    turned: Turned,
    averages: Mapping[Tensor, list[MovingVariable]],
) -> list[str]:
    """Return the ops that still depend on the batch, in words."""
    live, norms = _norms(parts)
    faults = [
        f"'{norm.name}': its statistics are still read"
        for norm in norms
        if norm.name not in turned.fused and not options.keeps(norm.name)
    ]
    claimed = {**turned.updates, **turned.kept_updates}
    claimed_averages = (
        a for group in averages.values() for a in group if a.update.name in claimed
    )
    faults += [
        f"'{update.name}' moves a variable towards '{tensor.name}', which outputs are "
        "computed from and which is no statistic of a batch norm that geutil knows"
        for update, tensor in batch_norms.unknown_averages(
            parts.graph, live, claimed_averages
        )
        if not options.keeps(update.name)
    ]
    return faults


def _norms(parts: GraphParts) -> tuple[frozenset[Operation], list[BatchMoments]]:
    live = live_ops(parts)
    fed = frozenset(get_forward_walk_ops(list(parts.inputs.values())))
    ordered = [op for op in parts.graph.get_operations() if op in live]
    return live, list(batch_norms.batch_moments(ordered, fed))


def _by_statistic(
    averages: Iterable[MovingVariable],
) -> MutableIdentityMap[list[MovingVariable]]:
    averages_of: MutableIdentityMap[list[MovingVariable]] = MutableIdentityMap()
    for average in averages:
        if average.statistic not in averages_of:
            averages_of[average.statistic] = []
        averages_of[average.statistic].append(average)
    return averages_of


def _check_names(options: StripOptions, norms: list[BatchMoments]) -> None:
    norm_names = [norm.name for norm in norms]
    for name in options.statistics:
        if name not in norm_names:
            raise ModelError(
                f"statistics: '{name}' is no batch norm in training mode; these are: "
                f"{norm_names}"
            )


def _kept(norm: BatchMoments) -> Stripped:
    return Stripped("kept", "batch norm", norm.name, "it is in keep")


def _turned(norm: BatchMoments, mean: _Source, variance: _Source) -> Stripped:
    reason = f"it reads the moving mean '{mean.name}' and variance '{variance.name}'"
    return Stripped("turned", "batch norm", norm.name, reason)


def _sources(
    parts: GraphParts,
    norm: BatchMoments,
    pair: tuple[list[MovingVariable], list[MovingVariable]],
    options: StripOptions,
    variable_names: Mapping[int, str],
) -> tuple[_Source, _Source] | str:
    """Return where mean and variance come from at inference, or why it is unknown."""
    variables = options.statistics.get(norm.name)
    if variables is not None:
        with creation.neutral(parts.graph):
            mean, variance = (
                _Source(
                    variable_names[id(v.handle)],
                    tf.raw_ops.ReadVariableOp(resource=v.handle, dtype=v.dtype),
                )
                for v in variables
            )
        return mean, variance
    sources = []
    for what, averages in zip(("mean", "variance"), pair, strict=True):
        if not averages:
            return f"nothing that runs moves a variable towards its {what}"
        handles = [a.variable for a in averages]
        names = [variable_names.get(id(h), h.op.name) for h in handles]
        if len({id(a.variable) for a in averages}) > 1:
            return f"{names} are all moving averages of its {what}"
        sources.append(_Source(names[0], _read(averages[0])))
    return sources[0], sources[1]


def _read(average: MovingVariable) -> Tensor:
    """Return the variable's value, read without waiting for anything."""
    if average.value is not None and not average.value.op.control_inputs:
        return average.value
    dtype = average.update.get_attr("dtype")
    with creation.neutral(average.update.graph):
        handle = average.variable
        value: Tensor = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
    return value


def _redirect_all(
    parts: GraphParts,
    chosen: list[tuple[BatchMoments, _Source, _Source]],
    live: frozenset[Operation],
    turned: Turned,
) -> None:
    for norm, _, variance in chosen:
        _redirect(norm, norm.variance, variance.value, live)
    # Who computes the variances needs the means; now those do not count any more.
    live = live_ops(parts)
    for norm, mean, variance in chosen:
        _redirect(norm, norm.mean, mean.value, live)
        if norm.fused is not None:
            with creation.neutral(parts.graph):
                turned.fused[norm.name] = (
                    _fitted(mean.value, norm.mean).name,
                    _fitted(variance.value, norm.variance).name,
                )


def write_fused(graph_def: Any, fused: Mapping[str, tuple[str, str]]) -> None:
    """Turn the fused batch norms of a `GraphDef` to inference, in place."""
    for node in graph_def.node:
        if node.name in fused:
            node.attr["is_training"].b = False
            node.attr.pop("exponential_avg_factor", None)
            node.input[3], node.input[4] = map(short_name, fused[node.name])


def _redirect(
    norm: BatchMoments, statistic: Tensor, value: Tensor, live: frozenset[Operation]
) -> None:
    """Let whoever reads a statistic, in whatever shape, read a variable's value."""
    shapes = [statistic]
    for tensor in shapes:
        readers = [op for op in adjacency.consumers(tensor) if op in live]
        # A layer may reshape the statistic first: go on to the shape of the variable.
        if tensor.dtype != value.dtype or not _same_shape(tensor, value):
            passing = [op for op in readers if op.type in SHAPING]
            shapes += [op.outputs[0] for op in passing if op.inputs[0] is tensor]
            readers = [op for op in readers if op.type not in SHAPING]
        if not readers:
            continue
        if not _fits(value, tensor):
            keep = Words(f"keep=['{norm.name}']", norm.name)
            raise ModelError(
                f"batch norm '{norm.name}': what is moved towards "
                f"'{statistic.name}' has shape {value.shape}, and '{tensor.name}' "
                f"{tensor.shape}; pass {keep} to leave it as it is"
            )
        with creation.neutral(tensor.graph):
            reroute_ts(_fitted(value, tensor), tensor, can_modify=readers)


def _same_shape(tensor: Tensor, value: Tensor) -> bool:
    rank = value.shape.rank
    return rank is not None and (
        tensor.shape.rank == rank and value.shape.is_compatible_with(tensor.shape)
    )


def _fits(value: Tensor, like: Tensor) -> bool:
    if value.shape.is_compatible_with(like.shape):
        return True
    return (
        like.shape.is_fully_defined()
        and value.shape.num_elements() == like.shape.num_elements()
    )


def _fitted(value: Tensor, like: Tensor) -> Tensor:
    """Return a value in the dtype and shape of a statistic."""
    if value.dtype != like.dtype:
        value = tf.cast(value, like.dtype)
    if not value.shape.is_compatible_with(like.shape):
        value = tf.reshape(value, like.shape)
    return value
