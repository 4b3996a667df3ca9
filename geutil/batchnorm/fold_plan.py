"""The plan of a fold: the layer that absorbs each norm, or the reason against it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from geutil.batchnorm import batch_statistics, build, norms
from geutil.batchnorm.build import Branch, Branched, Fold, joins_channels
from geutil.batchnorm.norms import (
    JOINS,
    AffineKind,
    Link,
    Norm,
    Obstacle,
    Path,
    Ways,
    across,
    as_links,
    axis_after,
    joined,
    joined_axis,
    link_of,
    misfit,
    outside_readers,
)
from geutil.bodies.function_bodies import OpenedFunction
from geutil.errors import ArgumentTypeError, FoldError
from geutil.graph import op_types, types, v1_control_flow
from geutil.graph.edits import Liveness
from geutil.graph.function_calls import Caller
from geutil.graph.resource_variables import check_step_variable
from geutil.graph.types import Graph, IdentityMap, MutableIdentityMap, Operation, Tensor
from geutil.select.networks.batch_norms import MovingStatistics, MovingVariable
from geutil.select.networks.layers import ROOTS, Layer, Origin, Origins, layer_of

EXACT, ONE_PASS = "exact", "one_pass"
_OF_BATCH = "normalizes by the statistics of the batch (is_training=True)"


SIGNS = op_types.FUSED_NORMS | ROOTS
"""Types of ops of which each batch norm has one."""


@dataclass(frozen=True, eq=False)
class Place:
    """A graph that batch norms are folded in."""

    graph: Graph
    prefix: str = ""  # the prefix of its ops' names in reports
    signature: str = ""  # of a model, the signature that it belongs to
    fixed: str = ""  # why nothing can be changed in it; "" if it can
    # Of the body of a function that a graph calls, the function.
    function: OpenedFunction | None = None
    inputs: tuple[Tensor, ...] = ()
    # Of a body, the ops that read its results, and nothing else.
    sinks: tuple[Operation, ...] = ()
    callers: tuple[Caller, ...] = ()  # of a body, all that calls it


@dataclass(frozen=True)
class Training:
    """The caller's choices in training; see `fold_batch_norms`."""

    delay: int | None = None
    step: Any = None
    statistics: str = EXACT

    def __post_init__(self) -> None:
        """Refuse impossible choices."""
        delay = self.delay
        if not isinstance(self.statistics, str):
            raise ArgumentTypeError(
                f"statistics is '{EXACT}' or '{ONE_PASS}', not "
                f"{types.type_name(self.statistics)}"
            )
        if self.statistics not in (EXACT, ONE_PASS):
            raise FoldError(
                f"statistics is '{self.statistics}'; pass '{EXACT}' or '{ONE_PASS}'"
            )
        if delay is None:
            if self.step is not None:
                raise FoldError(
                    "step counts towards a freeze, and there is none; pass "
                    "freeze_batch_norm_delay= as well"
                )
            return
        if isinstance(delay, bool) or not isinstance(delay, int):
            raise ArgumentTypeError(
                "freeze_batch_norm_delay is a number of steps or None, not "
                f"{types.type_name(delay)}"
            )
        if delay < 0:
            raise FoldError(f"freeze_batch_norm_delay is {delay}; pass 0 or more")
        if self.step is not None:
            check_step_variable(self.step)


@dataclass(frozen=True)
class Choices:
    """The choices of the caller; see `fold_batch_norms`."""

    scope: tuple[str, ...] | None = None
    clone_shared: bool = False
    assume_inference: bool = False


Refusal = tuple[Norm, Obstacle]


class WaysOn:
    """Plans the folds of batch norms into the layers behind them."""

    def __init__(
        self,
        origins: Origins,
        liveness: Liveness,
        kept_ids: Collection[int],
        steps: Collection[Operation],
        moving: Mapping[Norm, tuple[MovingVariable, ...]],
    ) -> None:
        self._origins = origins
        self._liveness = liveness
        self._kept = kept_ids
        self._steps = steps
        self._moving = moving

    def from_norm(self, norm: Norm, ahead: dict[Operation, Fold]) -> Fold | Obstacle:
        """Return the fold of a norm into the layer behind it, or the obstacle."""
        # `ahead`: the folds that are planned for batch norms behind it, by their first
        # ops.
        links = as_links(norm.steps)
        axis = next((step.axis for step in norm.steps if step.axis is not None), None)
        if any(step.axis not in (None, axis) for step in norm.steps):
            return Obstacle("works along another axis than the norm", norm.result.op)
        tensor = norm.result
        while True:
            op = self._only_reader(tensor)
            if isinstance(op, Obstacle):
                return op
            layer = layer_of(op, self._origins)
            if layer is not None and op.inputs[layer.data] is tensor:
                return self._into(norm, layer, links, axis)
            later = ahead.get(op)
            if later is not None and later.links[0].data is tensor:
                return self._joined(norm, links, axis, later)
            link = None if op in self._steps else link_of(op, self._origins)
            if link is None or norms.measures(link, self._origins):
                reason = f"({op.type}) stands between the norm and the next layer"
                return Obstacle(reason, op)
            if link.step is not None:
                if link.step.axis not in (None, axis):
                    return Obstacle("works along another axis than the norm", op)
            elif axis is not None:
                axis = axis_after(op, axis, self._size_read(op))
                if axis is None:
                    return Obstacle("does not hand on each channel as it is", op)
            links.append(link)
            tensor = op.outputs[0]

    def _size_read(self, op: Operation) -> int | None:
        """Return the number of channels that the layer after an op reads, if known."""
        reader = self._only_reader(op.outputs[0])
        if isinstance(reader, Obstacle) or reader.type != "MatMul":
            return None
        layer = layer_of(reader, self._origins)
        sizes = None if layer is None else layer.sizes(layer.inputs)
        return sizes[0] if sizes else None

    def _only_reader(self, tensor: Tensor) -> Operation | Obstacle:
        if id(tensor) in self._kept:
            return Obstacle("is read from outside the graph", tensor.op)
        readers = outside_readers([tensor], (), self._liveness)
        if len(readers) == 1:
            return readers[0]
        return Obstacle(
            f"has {len(readers)} readers; it can be folded into a single layer",
            tensor.op,
        )

    def _joined(
        self, norm: Norm, links: list[Link], axis: int | None, later: Fold
    ) -> Fold | Obstacle:
        """Return the fold of a norm together with the planned fold after it."""
        ahead = [s.axis for n in later.norms[:1] for s in n.steps if s.axis is not None]
        if axis is not None and ahead and ahead[0] != axis:
            return Obstacle("works along another axis than the norm", later.links[0].op)
        fold = self._into(norm, later.layer, [*links, *later.links], later.layer.axis)
        if isinstance(fold, Obstacle):
            return fold
        return replace(
            fold,
            norms=(norm, *later.norms),
            moving=(*fold.moving, *later.moving),
        )

    def _into(
        self, norm: Norm, layer: Layer, links: list[Link], axis: int | None
    ) -> Fold | Obstacle:
        if axis not in (None, layer.axis):
            return Obstacle("has its channels on another axis", layer.op)
        sizes = layer.sizes(layer.inputs)
        if sizes is None or layer.sizes(layer.outputs) is None:
            return _of_unknown_shape(layer)
        in_flow = _in_v1_flow(layer)
        if in_flow is not None:
            return in_flow
        count = prod(sizes)
        data = layer.op.inputs[layer.data].shape
        # A product of matrices has no groups.
        if layer.op.type != "MatMul" and (
            data.rank is None or data[layer.axis] != count
        ):
            return Obstacle(
                "has weights for another number of channels: groups of channels have "
                "weights of their own",
                layer.op,
            )
        objection = misfit(links, count)
        if objection is not None:
            return objection
        reason = self._objection_to_shift(layer, links)
        if reason is not None:
            return Obstacle(reason, layer.op)
        moving = self._moving.get(norm, ())
        return Fold((norm,), layer, tuple(links), self._bias(layer), True, moving)

    def _objection_to_shift(self, layer: Layer, links: Iterable[Link]) -> str | None:
        if not (layer.pads or layer.mixes) or self._shift_is_zero(links):
            return None
        if layer.mixes:
            return "has weights of more axes, and the norm shifts its data"
        if layer.transposed:
            return "is transposed: a shift of its data is not the same everywhere then"
        padding = layer.op.get_attr("padding").decode()
        return f"pads with zeros ({padding}), and the norm shifts what is not padded"

    def _shift_is_zero(self, links: Iterable[Link]) -> bool:
        steps = [link.step for link in links if link.step is not None]
        operands = (t for step in steps for t in step.parameters)
        if any(self._origins.of(t) is not Origin.CONSTANT for t in operands):
            return False
        affine = build.composed(steps)
        return affine is not None and (affine.offset is None or not affine.offset.any())

    def _bias(self, layer: Layer) -> tuple[Link, ...]:
        """Return the ops up to the one that adds the bias of a layer, if any."""
        # They belong to the layer if nothing else reads the ops between.
        links: list[Link] = []
        tensor, axis = layer.result, layer.axis
        sizes = layer.sizes(layer.outputs) or []
        while id(tensor) not in self._kept:
            readers = outside_readers([tensor], (), self._liveness)
            link = link_of(readers[0], self._origins) if len(readers) == 1 else None
            if link is None or link.data is not tensor or link.op in self._steps:
                return ()
            links.append(link)
            if link.step is not None:
                ends = link.step.kind is AffineKind.ADD and not norms.measures(
                    link, self._origins
                )
                fits = link.step.axis in (None, axis)
                fits = fits and misfit([link], prod(sizes)) is None
                return tuple(links) if ends and fits else ()
            after = axis_after(link.op, axis)
            if after is None:
                return ()
            axis, tensor = after, link.op.outputs[0]
        return ()


@dataclass(frozen=True, eq=False)
class FoldPlan:
    """The planned folds, and the batch norms that are left."""

    folds: list[Fold] = field(default_factory=list)
    # Batch norms that can be folded once they are moved to several layers.
    branched: list[Branched] = field(default_factory=list)
    # Each norm that is left, with the obstacle.
    refused: list[Refusal] = field(default_factory=list)


class Planner:
    """Plans the folds of a graph as it is now."""

    def __init__(
        self, graph: Graph, kept_ids: Collection[int], choices: Choices
    ) -> None:
        self._graph = graph
        self._origins = Origins(graph)
        self._liveness = Liveness(graph)
        self._kept = kept_ids
        self._choices = choices
        self._norms = [
            norm
            for norm in norms.find_norms(graph, self._origins, self._liveness)
            if not norms.is_correction(norm, self._origins)
        ]
        self._moving: dict[Norm, tuple[MovingVariable, ...]] = {}
        self._objections: dict[Norm, Obstacle] = {}
        for norm in self._norms:
            objection = self._objection(norm)
            if objection is not None:
                self._objections[norm] = objection
        # No path from another norm to its layer may cross a norm that stays.
        self._barred = {
            step.op: norm for norm in self._objections for step in norm.steps
        }
        self._ways = Ways(self._origins, self._liveness, kept_ids, self._barred)
        steps = {step.op for norm in self._norms for step in norm.steps}
        self._ways_on = WaysOn(
            self._origins, self._liveness, kept_ids, steps, self._moving
        )

    @cached_property
    def _statistics(self) -> MovingStatistics:
        """The moving statistics, which only norms in training are asked for."""
        return MovingStatistics(self._graph, self._origins)

    def behind_layers(self) -> FoldPlan:
        """Plan to fold batch norms into the layers before them."""
        plan = FoldPlan()
        folds: dict[Operation, Fold] = {}
        for norm in self._norms:
            path = self._objections.get(norm) or self._way_back(norm)
            if isinstance(path, Branched):
                plan.branched.append(path)
                continue
            if isinstance(path, Obstacle):
                plan.refused.append((norm, path))
                continue
            norms, moving = [norm], [*self._moving.get(norm, ())]
            # A norm further on takes along the norms before it that nobody else reads.
            members = {link.op for link in path.links}
            for link in reversed(path.links):
                earlier = folds.get(link.op)
                if earlier is None:
                    continue
                moving = [*earlier.moving, *moving]
                if not outside_readers([link.op.outputs[0]], members, self._liveness):
                    norms = [*folds.pop(link.op).norms, *norms]
                break
            fold = Fold(tuple(norms), path.layer, path.links, moving=tuple(moving))
            folds[fold.end] = fold
        plan.folds.extend(folds.values())
        return plan

    def for_training(self, training: Training) -> FoldPlan:
        """Plan to fold batch norms in training into the layers before them."""
        plan = FoldPlan()
        # The old layer stays for whoever else reads it, its statistics perhaps.
        ways = Ways(self._origins, self._liveness)
        for norm in (norm for norm in self._norms if norm.training):
            fold = self._outside(norm) or self._training_fold(norm, ways, training)
            if isinstance(fold, Fold):
                plan.folds.append(fold)
            else:
                plan.refused.append((norm, fold))
        return plan

    def before_layers(self, norms: Sequence[Norm]) -> FoldPlan:
        """Plan to fold batch norms into the layers behind them."""
        # `norms`: the batch norms that no layer before them takes in; by the names of
        # the ops they end in, since other folds may have come in between.
        plan = FoldPlan()
        ends = {norm.result.op for norm in norms}
        ahead: dict[Operation, Fold] = {}
        for norm in reversed(self._norms):
            if norm.result.op not in ends:
                continue
            fold = self._objections.get(norm) or self._ways_on.from_norm(norm, ahead)
            if isinstance(fold, Fold):
                # A norm further back takes along those behind it.
                for later in fold.norms[1:]:
                    ahead.pop(later.steps[0].op, None)
                ahead[norm.steps[0].op] = fold
            else:
                plan.refused.append((norm, fold))
        plan.folds.extend(reversed(ahead.values()))
        plan.refused.reverse()
        return plan

    def _objection(self, norm: Norm) -> Obstacle | None:
        """Return why a norm may not be folded, wherever it is."""
        op = norm.result.op
        outside = self._outside(norm)
        if outside is not None:
            return outside
        if v1_control_flow.is_inside(op):
            return Obstacle(
                "is in a loop or conditional of version 1, whose parts cannot be "
                "replaced one by one; make the graph with control flow v2",
                op,
            )
        if norm.training:
            return self._objection_to_training(norm)
        for t in norm.steps[0].parameters:
            if not self._origins.is_parameter(t):
                return Obstacle(f"reads '{t.name}', which depends on the data", op)
        return None

    def _outside(self, norm: Norm) -> Obstacle | None:
        scope = self._choices.scope
        if types.is_in_scope(norm.name, scope):
            return None
        reason = f"is outside of scope {types.quoted(scope)}"
        return Obstacle(reason, norm.result.op)

    def _objection_to_training(self, norm: Norm) -> Obstacle | None:
        """Return why a training norm may not be folded; note its moving statistics."""
        op = norm.result.op
        if not self._choices.assume_inference:
            reason = "pass assume_inference=True to use the moving ones instead"
            return Obstacle(f"{_OF_BATCH}; {reason}", op)
        moving = self._statistics.of(norm.parameters, norm.fused)
        if moving is None:
            reason = "the norm does not read them, and no op updates them"
            return Obstacle(
                f"{_OF_BATCH}, and no moving statistics are known: {reason}", op
            )
        self._moving[norm] = tuple(moving)
        return None

    def _training_fold(
        self, norm: Norm, ways: Ways, training: Training
    ) -> Fold | Obstacle:
        """Return the fold of a norm for training, or the obstacle."""
        path = ways.path_to(norm)
        if isinstance(path, Obstacle):
            return path
        layer = path.layer
        if layer.sizes(layer.outputs) is None:
            return _of_unknown_shape(layer)
        members = {step.op for step in norm.steps}
        for link in path.links:
            # Of other steps `path_to` says so.
            step = link.step
            if step is None or step.op in members or step.operand is not None:
                continue
            if step.op.get_attr("is_training"):
                return Obstacle(norms.IN_BETWEEN, step.op)
        inside = [step.result for step in norm.steps[:-1]]
        readers = outside_readers(inside, members, self._liveness)
        if readers:
            return Obstacle("reads what is computed within the norm", readers[0])
        statistics = batch_statistics.statistics_of(
            norm, self._origins, with_mean=training.delay is not None
        )
        if isinstance(statistics, Obstacle):
            return statistics
        if training.statistics == ONE_PASS:
            objection = batch_statistics.not_of_input(statistics)
            if objection is not None:
                reason = f"{objection.reason}; pass statistics='{EXACT}'"
                return Obstacle(reason, objection.op)
        return Fold((norm,), layer, path.links, statistics=statistics)

    def _way_back(self, norm: Norm) -> Path | Branched | Obstacle:
        path = self._ways.path_to(norm)
        if isinstance(path, Path):
            return self._objection_to(path) or path
        # The statistics of a norm in training go on reading what is joined.
        if path.op.type not in JOINS or not path.no_layer or norm.training:
            return path
        found = branches_of(norm, self._ways, self._objection_to)
        return replace(found, no_layer=True) if isinstance(found, Obstacle) else found

    def _objection_to(self, path: Path) -> Obstacle | None:
        """Return why a norm may not be folded into a layer along a path, or None."""
        layer = path.layer
        sizes = layer.sizes(layer.outputs)
        objection = (
            _in_v1_flow(layer) if sizes is not None else _of_unknown_shape(layer)
        )
        if sizes is not None and objection is None:
            objection = misfit(path.links, prod(sizes))
        if objection is not None:
            return objection
        if path.shared and not self._choices.clone_shared:
            return Obstacle(
                f"also reads what lies between '{layer.op.name}' and the norm; pass "
                "clone_shared=True to have the layer computed twice",
                path.shared[0],
            )
        return None


def _of_unknown_shape(layer: Layer) -> Obstacle:
    return Obstacle("has weights of a shape that is not known", layer.op)


def _in_v1_flow(layer: Layer) -> Obstacle | None:
    if v1_control_flow.is_inside(layer.op):
        return Obstacle("is in a loop or conditional of version 1", layer.op)
    return None


def branches_of(
    norm: Norm,
    ways: Ways,
    objection_to: Callable[[Path], Obstacle | None],
) -> Branched | Obstacle:
    """Return the branches that a batch norm can be moved to, or the obstacle."""
    # `norm`: a norm at inference that no single layer comes before.
    # `objection_to`: tells why a norm may not be folded along a path.
    tree: list[Branch] = []
    ends = as_links(norm.steps)
    waiting: list[tuple[Tensor, list[Link], Branch | None]] = [(norm.input, ends, None)]
    while waiting:
        tensor, behind, parent = waiting.pop()
        start = ways.start_of(tensor)
        if isinstance(start, Obstacle):
            return start
        end = tensor if parent else norm.result
        branch = Branch(start, (*start.links, *behind), end, [])
        tree.append(branch)
        if parent is not None:
            parent.branches.append(branch)
        if start.layer is not None:
            continue
        op = start.tensor.op
        objection = _objection_to_join(op, ways, parent) or _shared(branch, ways)
        if objection is not None:
            return objection
        reads = list(enumerate(joined(op)))
        waiting += [(t, [Link(op, i, None)], branch) for i, t in reversed(reads)]
    for branch in reversed(tree):
        objection = _settled(branch, ways, objection_to)
        if objection is not None:
            return objection
    bare = norm.fused is None and not any(map(ways.origins.spreads, norm.parameters))
    return Branched(norm, tuple(tree), bare)


def _objection_to_join(
    op: Operation, ways: Ways, parent: Branch | None
) -> Obstacle | None:
    """Return why a norm cannot be moved before an op, or None."""
    if op.type not in JOINS:
        return Obstacle(
            f"reads '{op.name}' ({op.type}), and the norm would have to be folded into "
            "a layer there, too",
            parent.join if parent else op,
        )
    reads = joined(op)
    if len({id(t) for t in reads}) < len(reads):
        return Obstacle("joins a tensor with itself", op)
    for t in reads:
        if ways.origins.of(t) is not None:
            return Obstacle(f"joins '{t.name}', which no layer makes", op)
    return None


def _shared(branch: Branch, ways: Ways) -> Obstacle | None:
    """Return another reader of the data between a join and the next, if any."""
    readers = ways.readers_between(branch.start.tensor, branch.links)
    if isinstance(readers, Obstacle):
        return readers
    for reader in readers:
        return Obstacle("also reads what lies between the layers and the norm", reader)
    return None


def _settled(
    branch: Branch, ways: Ways, objection_to: Callable[[Path], Obstacle | None]
) -> Obstacle | None:
    """Note the channels of a branch whose own branches are settled; or say why not."""
    layer = branch.start.layer
    if layer is not None:
        path = ways.path(layer, branch.links)
        if isinstance(path, Obstacle):
            return path
        branch.axis = _axis_at_end(layer.axis, branch.links[:-1])
        branch.channels = prod(layer.sizes(layer.outputs) or [0])
        return objection_to(path)
    join = branch.join
    axes = {axis_after(join, b.axis) for b in branch.branches}
    counts = [b.channels for b in branch.branches]
    axis = axes.pop() if len(axes) == 1 else None
    if axis is None or (join.type == "ConcatV2" and joined_axis(join) is None):
        return Obstacle("does not hand on each channel as it is", join)
    if joins_channels(join, axis):
        branch.channels = sum(counts)
    elif len({*counts}) == 1:
        branch.channels = counts[0]
    else:
        return Obstacle("joins different numbers of channels", join)
    objection = across(axis, branch.links)
    if objection is not None:
        return objection
    branch.axis = _axis_at_end(axis, branch.links[:-1])
    return misfit(branch.links, branch.channels)


def _axis_at_end(axis: int, links: Sequence[Link]) -> int:
    for link in links:
        if link.step is None:
            axis = axis_after(link.op, axis) or axis
    return axis


Passed = list[tuple[Tensor, Operation]]
"""(argument, constant) for each argument of a body that is always the same constant."""


def constants_passed(places: Sequence[Place]) -> list[Passed]:
    """Return for each place the constant arguments that batch norms may read."""
    # An argument is a constant if all callers pass the same one, and loops forward it
    # as it is. Nothing is changed.
    graph_ids = _wanted(places)
    constant_by_argument: MutableIdentityMap[Operation] = MutableIdentityMap()
    listed: list[Passed] = []
    for place in places:
        listed.append([])
        if not place.callers or place.fixed or id(place.graph) not in graph_ids:
            continue
        for index, argument in enumerate(place.inputs):
            if not argument.dtype.is_floating or not readers_in(place, argument):
                continue
            constant = _passed(place, index, constant_by_argument)
            if constant is not None:
                constant_by_argument[argument] = constant
                listed[-1].append((argument, constant))
    return listed


def _wanted(places: Sequence[Place]) -> frozenset[int]:
    """Return the ids of bodies that may hold batch norms, and of their callers."""
    graph_ids: set[int] = set()
    for place in reversed(places):
        if id(place.graph) in graph_ids or _may_hold_norms(place.graph):
            graph_ids.add(id(place.graph))
            graph_ids.update(id(caller.op.graph) for caller in place.callers)
    return frozenset(graph_ids)


def _may_hold_norms(graph: Graph) -> bool:
    return any(op.type in SIGNS for op in graph.get_operations())


def readers_in(place: Place, argument: Tensor) -> list[Operation]:
    """Return the ops of a body that read an argument, its results apart."""
    return [op for op in argument.consumers() if op not in place.sinks]


def _passed(
    place: Place, index: int, constant_by_argument: IdentityMap[Operation]
) -> Operation | None:
    """Return the constant that all callers pass as an argument, if they do."""
    constant: Operation | None = None
    for caller in place.callers:
        # From its second round on, a loop reads its own result.
        if caller.is_loop and not _is_handed_on(place, index):
            return None
        if not (caller.is_loop or caller.is_branching or caller.is_call):
            return None
        source = _source(caller.op.inputs[caller.first_argument + index])
        op = constant_by_argument.get(source, source.op)
        if op.type != "Const":
            return None
        if constant is not None and op.get_attr("value") != constant.get_attr("value"):
            return None
        constant = op
    return constant


def _is_handed_on(place: Place, index: int) -> bool:
    """Return whether the body of a loop returns a loop variable unchanged."""
    if index >= len(place.sinks):
        return False
    return _source(place.sinks[index].inputs[0]) is place.inputs[index]


def _source(tensor: Tensor) -> Tensor:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor
