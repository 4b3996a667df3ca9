"""Folding the batch norms of a graph or model, in all its graphs and bodies.

Each graph is planned, built and reported for itself. Tracing passes constants from
outside a loop or a branch to its body as arguments: in the body a weight is then not a
constant, but any value that a caller passes, so bodies get copies of such constants.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import tensorflow as tf

from geutil.batchnorm import build, fold_plan, training_build
from geutil.batchnorm.build import Branched, Fold, build_branches
from geutil.batchnorm.fold_plan import Choices, Place, Refusal, Training
from geutil.batchnorm.fold_report import Folded, FoldReport, Refused
from geutil.batchnorm.norms import Norm, Obstacle, stacked_item
from geutil.batchnorm.training_build import Built
from geutil.bodies.function_bodies import OpenedFunctions
from geutil.errors import ArgumentTypeError, FoldError, GeutilError, SelectionError
from geutil.graph import creation, edits, replicas, state, types
from geutil.graph.edits import Liveness, undone_on_error
from geutil.graph.function_calls import callers_in
from geutil.graph.resource_variables import step_counter_of
from geutil.graph.runtime import inlined_convolution, is_convolution_call
from geutil.graph.types import (
    Graph,
    IdentitySet,
    Operation,
    Tensor,
)
from geutil.reroute.tensors import reroute_ts
from geutil.rewrite.driver import replace_each
from geutil.select import selections


@tf.autograph.experimental.do_not_convert
def fold_batch_norms(
    graph_or_model: Any,
    *,
    is_training: bool = False,
    freeze_batch_norm_delay: int | None = None,
    step: Any = None,
    statistics: str = "exact",
    scope: Any = None,
    strict: bool = False,
    assume_inference: bool = False,
    clone_shared: bool = False,
    keep: Iterable[Any] = (),
    outputs: Any = (),
) -> FoldReport:
    """Fold batch normalization into the layers before or after it.

    A batch norm at inference multiplies each channel by a number and adds another. Both
    can be absorbed by a layer that is linear in its weights: the layer with new
    weights, and one bias, remains. Constants are folded in float64; for variables, new
    ops compute the weights, and the variables stay as they are. The old ops stay in the
    graph, and nothing reads them any more. A norm of layers that are added,
    concatenated or stacked is folded into each of them, and one after average pooling
    or image resizing into the layer before that.

    With `is_training`, batch norms that normalize by the statistics of the batch are
    folded, too, before gradients are built: in a v1 graph, or in the FuncGraph of a
    function while it is traced (`tf.gradients` sees the fold, a tape that was open
    before does not). Weights absorb the moving variance, so that they can be quantized
    as they will be deployed; the difference to the batch's is corrected after the layer
    (Krishnamoorthi 2018, arXiv 1806.08342, section 3.2.2). Values and gradients stay
    the same. The old layer still runs, for the statistics, or these are computed from
    the folded layer, which then runs alone.

    Batch norms in the bodies of loops, conditionals and called functions are folded
    there, if their layer is in the same body and its weights reach the body as
    constants or variables. All signatures of a model are folded.

    A norm that nothing reads, such as one that is fetched, or returned by a function
    that is being traced, is folded too. If it ends in an addition, that op stays, and
    adds the bias of the folded layer; a fused norm stays as it was, and the report's
    `into` names the tensor to fetch instead.

    Args:
        graph_or_model: a graph, or a `geutil.model.Model`.
        is_training: fold batch norms in training mode for training. Norms at inference,
            such as those of frozen layers, are folded as always.
        freeze_batch_norm_delay: the training step, counted from 1, from which on batch
            norms use the moving statistics, which then stop moving. An int64 variable
            `fake_quantization_step` counts the steps; `tf.where` chooses, so both are
            computed in each step. None never switches, and counts nothing.
        step: an int64 variable to count the steps, for functions that are traced more
            than once; None creates one.
        statistics: the source of the batch statistics. "exact" computes them from the
            layer as it was, which runs in addition: weights may be quantized, and the
            statistics stay those of the float weights. "one_pass" computes them from
            the folded layer, divided by the factor of its weights: each layer runs
            once, and if its weights are quantized, the norm normalizes their result, as
            when deployed. Until weights are quantized, both equal the original norm, up
            to rounding. Both scale weights by gamma / sqrt(moving variance + epsilon).
            Where the moving variance is far from the batch's, symmetric ranges by
            channel scale along, and quantized weights are the same multiples; with one
            range for the whole tensor, channels whose moving variance is too high get
            too few steps, until the averages have settled.
        scope: a name scope, with or without a slash at its end, or a Keras layer, its
            name or its path: only batch norms in it are folded; None: all.
        strict: whether to raise an error if a norm was refused.
        assume_inference: also fold batch norms that normalize by the statistics of the
            batch, with their moving statistics: those that a fused norm reads, or
            variables that the graph updates. Their update ops stay, and run if they are
            requested; the fold reads the values from before.
        clone_shared: compute a layer twice if something else reads it, too.
        keep: ops, tensors, names of these and Keras layers whose values must stay,
            since they are fetched by name. Norms that cannot be folded without changing
            these are refused.
        outputs: tensors of a graph: only batch norms they depend on are considered. By
            default all; in a replica of `tf.distribute`, those of that replica.

    Returns:
        Every batch norm, folded or refused with the reason.

    Raises:
        ArgumentTypeError: the first argument is neither a graph nor a model, or keep
            has elements other than ops and tensors.
        SelectionError: an element of keep, or an output, is of another graph.
        FoldError: with `strict`, a norm in the scope was refused; nothing is changed.
            Also if arguments contradict each other.
        TransformError: the graph counts its steps in another variable than `step`.
        StaleGraphError, FinalizedGraphError: an edit would have no effect, or is
            forbidden.

    Cost: linear in ops and edges, and a few milliseconds for each fold.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.batchnorm import fold_batch_norms
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.compat.v1.placeholder(tf.float32, [None, 8, 8, 3])
        ...     y = tf.nn.conv2d(x, tf.ones([1, 1, 3, 2]), 1, "SAME", name="conv")
        ...     two = tf.constant([2.0, 2.0])
        ...     z = tf.nn.batch_normalization(y, two, two, two, two, 1e-3, name="norm")
        >>> print(fold_batch_norms(graph))
        1 of 1 batch norm(s) folded, 0 refused
        folded:
          norm  into Conv2D 'conv'
    """
    training = _training(
        is_training, freeze_batch_norm_delay, step, statistics, assume_inference
    )
    with selections.outputs_meant(graph_or_model, outputs):
        places = Places(graph_or_model)
        choices = Choices(_scopes(scope, places), clone_shared, assume_inference)
        return _fold(places, choices, _kept(keep, places), training, strict=strict)


def _fold(
    places: Places,
    choices: Choices,
    kept_tensors: IdentitySet,
    training: Training | None,
    *,
    strict: bool,
) -> FoldReport:
    """Fold the requested batch norms in all places."""
    scopes = choices.scope
    folders = [
        Folder(place, choices, kept_tensors, training) for place in places.listed
    ]
    passed = fold_plan.constants_passed(places.listed)
    settled = [f for f, constants in zip(folders, passed, strict=True) if not constants]
    if strict:
        # Before anything is touched: functions of a model need not be rebuilt.
        refusals = [r for f in settled for r in f.refusals()]
        _check_none(FoldReport((), (*refusals, *places.unopened)), scopes)
    with ExitStack() as stack:
        for place in places.listed:
            stack.enter_context(undone_on_error(place.graph))
        sunk = list(map(sink_constants, places.listed, passed))
        reports = [folder.run() for folder in folders]
        edited = []
        for place, constants, report in zip(places.listed, sunk, reports, strict=True):
            if report.folded:
                edited.append(place)
            else:
                raise_constants(constants)
        places.write_back(edited)
        whole = FoldReport(
            tuple(entry for r in reports for entry in r.folded),
            (*(entry for r in reports for entry in r.refused), *places.unopened),
            next((r.step for r in reports if r.step is not None), None),
        )
        if strict:
            _check_none(whole, scopes)
    return whole


def _training(
    is_training: bool,
    delay: int | None,
    step: Any,
    statistics: str,
    assume_inference: bool,
) -> Training | None:
    """Return the caller's choices in training; None outside of training."""
    if is_training and assume_inference:
        raise FoldError("is_training=True and assume_inference=True exclude each other")
    training = Training(delay, step, statistics)
    if is_training:
        return training
    for name, given in (
        ("freeze_batch_norm_delay", delay is not None),
        ("statistics", statistics != fold_plan.EXACT),
    ):
        if given:
            raise FoldError(f"{name} is for training; pass is_training=True")
    return None


def _scopes(scope: Any, places: Places) -> tuple[str, ...] | None:
    """Return the scopes that a scope or layer corresponds to, as reports name them."""
    if isinstance(scope, str):
        graphs = [place.graph for place in places.listed if not place.prefix]
        if any(p.prefix and p.prefix.startswith(scope) for p in places.listed):
            return (scope.rstrip("/"),)
        return selections.scopes_meant(graphs, scope)
    return selections.scopes_meant([place.graph for place in places.listed], scope)


def _check_none(report: FoldReport, scope: tuple[str, ...] | None) -> None:
    """Raise if a norm in the scope was refused."""
    refused = [r for r in report.refused if types.is_in_scope(r.norm, scope)]
    if refused:
        raise FoldError(
            f"{len(refused)} batch norm(s) cannot be folded; nothing was "
            f"changed:\n{FoldReport((), tuple(refused))}"
        )


def _kept(keep: Any, places: Places) -> IdentitySet:
    """Return the tensors to keep, those of ops among them."""
    graphs = [place.graph for place in places.listed]
    tensors: IdentitySet = IdentitySet()
    for element in types.as_list(keep):
        if selections.is_name(element):
            for t in _named(element, graphs):
                tensors.add(t)
            continue
        if not types.is_op(element) and not types.is_tensor(element):
            raise ArgumentTypeError(
                "keep holds ops and tensors of a graph, names of theirs, or Keras "
                f"layers, not {types.type_name(element)}"
            )
        if not any(element.graph is graph for graph in graphs):
            raise SelectionError(
                f"'{element.name}' in keep belongs to another graph than the one to "
                "fold in"
            )
        for t in element.outputs if types.is_op(element) else [element]:
            tensors.add(t)
    return tensors


def _named(element: Any, graphs: list[Graph]) -> IdentitySet:
    """Return the tensors of a name or layer, in each graph that has it."""
    found: IdentitySet = IdentitySet()
    missing: SelectionError | None = None
    for graph in graphs:
        try:
            found.add(selections.tensor_of(graph, element))
        except SelectionError as error:
            missing = missing or error
    if not found and missing is not None:
        raise SelectionError(f"keep: {missing}")
    return found


_NO_MODEL = "batch norms are folded in a tf.Graph or a geutil.model.Model, not in"


class Places:
    """The places of a graph or model."""

    def __init__(self, graph_or_model: Any) -> None:
        # The places, that of the graph or model itself first.
        self.listed: list[Place] = []
        # Functions that may hold batch norms and cannot be opened.
        self.unopened: list[Refused] = []
        self._functions: OpenedFunctions | None = None
        if types.is_graph(graph_or_model):
            self._functions = OpenedFunctions(graph_or_model)
            own = frozenset(replicas.own_operations(graph_or_model))
            self.listed = [Place(graph_or_model), *_bodies(self._functions, own)]
            graphs = [place.graph for place in self.listed]
            self.unopened = list(_unopened(self._functions, own, graphs))
            return
        for name, model in types.signatures_of(graph_or_model, _NO_MODEL).items():
            self.listed.append(Place(model.graph, "", name))
            self._add_bodies(model, name)

    def _add_bodies(self, model: Any, signature: str) -> None:
        """List the bodies of the functions that the graph of a model calls."""
        if not callers_in(model.graph):
            return
        bodies: dict[str, Any] = {}
        for key in model.functions:
            try:
                bodies[key] = model.functions[key]
            except GeutilError as error:
                reason = f"cannot be opened: {error}"
                self.unopened.append(Refused(key, reason, key, signature))
        graphs = [model.graph, *(body.graph for body in bodies.values())]
        caller_by_op = {caller.op: caller for g in graphs for caller in callers_in(g)}
        for key, body in bodies.items():
            ops = body.callers
            callers = [caller_by_op[op] for op in ops if op in caller_by_op]
            # A list of callers is of use only if it is complete.
            place = Place(
                body.graph,
                f"{key}/",
                signature,
                inputs=tuple(body.inputs.values()),
                sinks=tuple(body.outputs.sinks.values()),
                callers=tuple(callers) if len(callers) == len(ops) else (),
            )
            self.listed.append(place)

    def write_back(self, edited: Collection[Place]) -> None:
        """Let the callers of edited bodies call them; models do that themselves."""
        if self._functions is not None:
            functions = [p.function for p in edited if p.function is not None]
            self._functions.write_back(functions)


def _bodies(functions: OpenedFunctions, own: Collection[Operation]) -> Iterator[Place]:
    """Yield the bodies of functions that own ops call, fixed ones with the reason."""
    # Callers come before the bodies that they call.
    graphs: set[Graph] = set()
    for function in functions.opened:
        callers = [caller.op for caller in function.callers]
        if callers and not any(op in own or op.graph in graphs for op in callers):
            continue
        graphs.add(function.graph)
        fixed = ""
        if function.fixed:
            fixed = (
                "is in a function that an op calls by bearing its name as its type, "
                "which cannot be made to call another; use geutil.model.open"
            )
        yield Place(
            function.graph,
            f"{function.name}/",
            "",
            fixed,
            function,
            tuple(function.inputs.values()),
            tuple(function.sinks.values()),
            tuple(function.callers),
        )


def _unopened(
    functions: OpenedFunctions, own: Collection[Operation], graphs: Sequence[Graph]
) -> Iterator[Refused]:
    for function in functions.unopened:
        caller = function.caller
        if caller not in own and caller.graph not in graphs[1:]:
            continue
        nodes = (node for d in function.definitions for node in d.node_def)
        if any(node.op in fold_plan.SIGNS for node in nodes):
            reason = f"calls a function that cannot be opened: {function.reason}"
            yield Refused(function.name, reason, function.caller.name)


Sunk = list[tuple[Tensor, Tensor]]
"""(argument, constant) for each argument that is read as a constant."""


def sink_constants(place: Place, passed: fold_plan.Passed) -> Sunk:
    """Make a body read its own copies of the constants that it is passed."""
    # Callers go on passing them.
    sunk = []
    for argument, constant in passed:
        copy = _copied(place, argument, constant)
        reroute_ts([copy], [argument], can_modify=fold_plan.readers_in(place, argument))
        sunk.append((argument, copy))
    return sunk


def raise_constants(sunk: Sunk) -> None:
    """Make readers of sunk constants read the arguments again."""
    for argument, constant in sunk:
        reroute_ts([argument], [constant])


def _copied(place: Place, argument: Tensor, constant: Operation) -> Tensor:
    node = constant.node_def
    node.name = types.absolute_unique_name(place.graph, argument.op.name)
    node.attr.pop("_class", None)
    del node.input[:]
    with creation.neutral(place.graph):
        return creation.make_op(place.graph, node, []).outputs[0]


_KEPT = (
    "is in keep, and cannot read the folded layer itself; take it out, and fetch what "
    "the report names"
)


class Folder:
    """Folds the batch norms of one graph."""

    # `training`: how batch norms in training are folded for training; None if they are
    # not. In the bodies of functions they never are.

    def __init__(
        self,
        place: Place,
        choices: Choices,
        kept_tensors: IdentitySet,
        training: Training | None = None,
    ) -> None:
        self._place = place
        self._graph = place.graph
        self._kept = [t for t in kept_tensors if t.graph is place.graph]
        self._choices, self._fixed = _choices_in(place, choices)
        self._training = None if place.prefix else training
        self._folded: list[Folded] = []
        # By the last ops of norms that were moved to several layers: the norms that are
        # in them, and what ends these now.
        self._moved: dict[Operation, tuple[tuple[Norm, ...], Operation]] = {}
        self._stands_for: dict[Operation, Operation] = {}
        self._unmoved: dict[Operation, str] = {}

    def run(self) -> FoldReport:
        """Fold the batch norms that can be folded."""
        before = state.count_ops(self._graph)
        with creation.neutral(self._graph):
            in_training = self._train()
            planner = self._planner()
            behind = planner.behind_layers()
            while not self._fixed and self._clear(behind):
                planner = self._planner()
                behind = planner.behind_layers()
            refused = self._apply(behind)
            left: list[Refusal] = []
            if refused:
                # Folds may have changed what the planner has looked at.
                planner = self._planner() if behind.folds else planner
                norms = [norm for norm, _ in refused]
                left = self._apply(planner.before_layers(norms))
        for op in state.ops_since(self._graph, before):
            creation.set_mark(op, creation.DERIVED)
        counter = None if self._training is None else step_counter_of(self._graph)
        step = None if counter is None else counter.variable
        left = [in_training.get(n.result.op, (n, o)) for n, o in left]
        refused = [(n, o) for n, o in refused if n.result.op not in in_training]
        names = selections.LayerNames(self._graph)
        folded = tuple(names.noted(self._folded, "norm"))
        return FoldReport(folded, self._report(refused, left), step)

    def _train(self) -> dict[Operation, Refusal]:
        """Fold the batch norms in training; return those left, by their ends."""
        training = self._training
        if training is None:
            return {}
        plan = self._planner().for_training(training)
        if self._clear(plan):
            # Clearing rebuilt ops that the first plan names.
            plan = self._planner().for_training(training)
        refused = {norm.result.op: (norm, obstacle) for norm, obstacle in plan.refused}
        freeze = training_build.freeze_of(self._graph, training)
        staying = [fold for fold in plan.folds if build.can_stay(fold)]
        held_ends = build.held_ends(self._graph, staying)
        built: dict[Operation, Built] = {}
        for fold in plan.folds:
            # An end that somebody holds stays, and reads the folded layer.
            if fold.end in held_ends:
                made = training_build.build_training(
                    fold, freeze, training, end_stays=True
                )
                training_build.stay(fold, made)
                training_build.settle(fold, made, freeze)
        rest = {fold.end: fold for fold in plan.folds if fold.end not in held_ends}

        def fold_batch_norm(end: Operation) -> list[Tensor | None]:
            made = training_build.build_training(rest[end], freeze, training)
            built[end] = made
            return [made.result, *made.rest]

        reasons: Mapping[Operation, str] = {}
        if rest:
            reasons = replace_each(
                self._graph, rest, fold_batch_norm, name="fold_batch_norm"
            ).refused
        for fold in plan.folds:
            end = fold.end
            if end in reasons:
                refused[end] = fold.norms[0], Obstacle(reasons[end], end)
                continue
            if end in rest:
                training_build.settle(fold, built[end], freeze)
            self._note(fold, end if end in held_ends else built[end].result.op)
        return refused

    def refusals(self) -> tuple[Refused, ...]:
        """Return the refusals that are known beforehand."""
        planner = self._planner()
        behind = planner.behind_layers()
        refused = self._refused(behind)
        if self._training is not None:
            plan = planner.for_training(self._training)
            training_ends = {fold.end for fold in plan.folds}
            instead = {norm.result.op: (norm, obst) for norm, obst in plan.refused}
            refused = [
                instead.get(n.result.op, (n, o))
                for n, o in refused
                if n.result.op not in training_ends
            ]
        if not self._fixed:
            cleared = _in_the_way(refused)
            refused = [(n, o) for n, o in refused if o.op not in cleared]
        left = self._refused(planner.before_layers([norm for norm, _ in refused]))
        return self._report(refused, left)

    def _report(
        self,
        behind: list[Refusal],
        left: list[Refusal],
    ) -> tuple[Refused, ...]:
        """Return the batch norms that are left, with the reason that tells more."""
        # That is the one about the layer before the norm, if there is such a layer.
        first = {norm.result.op: obstacle for norm, obstacle in behind}
        prefix, signature = self._place.prefix, self._place.signature
        entries = []
        for norm, obstacle in left:
            before = first.get(norm.result.op, obstacle)
            reason, op = before.reason, before.op
            if before.no_layer and before is not obstacle:
                reason, op = f"{obstacle.reason}, and {_stated(before)}", obstacle.op
            norms, _ = self._moved.get(norm.result.op, ((norm,), op))
            entries += [
                Refused(prefix + one.name, reason, prefix + op.name, signature)
                for one in norms
            ]
        return tuple(selections.LayerNames(self._graph).noted(entries, "norm"))

    def _clear(self, plan: fold_plan.FoldPlan) -> bool:
        """Change the ops between batch norms and layers; return whether any did."""
        # Calls of one convolution give way to it, slices of a stack to the stacked
        # tensor, and batch norms of several layers are moved to each of them.
        in_the_way = _in_the_way(plan.refused)
        cleared = 0
        if in_the_way:
            done = replace_each(
                self._graph, in_the_way, _cleared, name="inlined", keep=self._kept
            )
            cleared = len(in_the_way) - len(done.refused)
        branched = [b for b in plan.branched if self._objection_to(b) is None]
        return bool(self._move(branched) or cleared)

    def _move(self, branched: Sequence[Branched]) -> bool:
        """Move batch norms to the layers of their branches; return whether any did."""
        # Those that lie between another one and its layers go along with that.
        inside = {
            op for b in branched for op in b.replaced if op is not b.norm.result.op
        }
        last = [b for b in branched if b.norm.result.op not in inside]
        state.check_editable(self._graph, [b.norm.result.op for b in last])
        norm_by_end = {b.norm.result.op: b.norm for b in branched}
        built: dict[Operation, Tensor] = {}
        for entry in last:
            result, new_ends = build_branches(entry, norm_by_end)
            built[entry.norm.result.op] = result
            for new_end, norms in new_ends:
                self._moved[new_end] = norms, result.op
        into, reasons = self._replace(built)
        for entry in last:
            end = entry.norm.result.op
            if end in into:
                self._stands_for.update(dict.fromkeys(entry.replaced, into[end]))
            else:
                self._unmoved[end] = reasons[end.name]
        return bool(into)

    def _planner(self) -> fold_plan.Planner:
        kept_ids = frozenset(
            id(t) for t in (*edits.results_of(self._graph), *self._kept)
        )
        return fold_plan.Planner(self._graph, kept_ids, self._choices)

    def _refused(self, plan: fold_plan.FoldPlan) -> list[Refusal]:
        """Return the refusals before anything is built."""
        refused = list(plan.refused)
        for entry in plan.branched:
            objection = self._objection_to(entry)
            if objection is not None:
                refused.append((entry.norm, objection))
        for fold in plan.folds:
            objection = self._objection(fold)
            if objection is not None:
                refused += [(norm, objection) for norm in fold.norms]
        return refused

    def _objection(self, fold: Fold) -> Obstacle | None:
        if self._fixed:
            return Obstacle(self._fixed, fold.end)
        if self._is_kept(fold.end) and not build.can_stay(fold):
            return Obstacle(_KEPT, fold.end)
        return None

    def _objection_to(self, branched: Branched) -> Obstacle | None:
        end = branched.norm.result.op
        reason = _KEPT if self._is_kept(end) else self._unmoved.get(end)
        reason = self._fixed or reason
        return Obstacle(reason, end) if reason else None

    def _is_kept(self, op: Operation) -> bool:
        return any(t.op is op for t in self._kept)

    def _apply(self, plan: fold_plan.FoldPlan) -> list[Refusal]:
        """Carry out a plan; return the refusals, then or now."""
        refused = self._refused(plan)
        staying = [fold for fold in plan.folds if build.can_stay(fold)]
        held_ends = build.held_ends(self._graph, staying, self._kept)
        folds = {f.end: f for f in plan.folds if self._objection(f) is None}
        into: dict[Operation, Operation] = {}
        for end, fold in folds.items():
            if end in held_ends and build.build_in_place(fold) is not None:
                into[end] = end
        rest = {end: fold for end, fold in folds.items() if end not in into}
        keep_reasons = {end.name: _KEPT for end in rest if self._is_kept(end)}
        rest = {end: fold for end, fold in rest.items() if end.name not in keep_reasons}
        state.check_editable(self._graph, list(rest))
        # All are built before the first takes its place, so that the topological order
        # needs to be renewed just once.
        built = {end: build.build_waiting(fold) for end, fold in rest.items()}
        replaced_by, reasons = self._replace(built)
        into |= replaced_by
        for end in rest:
            if end not in into and end.name not in reasons:
                into[end] = _standing_in(end, rest, into)
        reasons |= keep_reasons
        for end, fold in folds.items():
            if end.name in reasons:
                obstacle = Obstacle(reasons[end.name], end)
                refused += [(norm, obstacle) for norm in fold.norms]
            else:
                self._note(fold, into[end])
        return refused

    def _replace(
        self, built: Mapping[Operation, Tensor]
    ) -> tuple[dict[Operation, Operation], dict[str, str]]:
        """Let readers of the ends of batch norms read the replacements."""
        # Returns the ops that make that; and for each end that is left, by name, the
        # reason.
        into: dict[Operation, Operation] = {}
        if not built:
            return into, {}

        state.renew_order(self._graph)

        def fold_batch_norm(end: Operation) -> list[Tensor | None]:
            result = built[end]
            into[end] = result.op
            # A fused norm has outputs besides, which are left alone.
            return [result, *([None] * (len(end.outputs) - 1))]

        results = edits.results_of(self._graph)
        keep = [t for t in (*results, *self._kept) if t.op not in built]
        # Results of a function survive replacements; here they are replaced too.
        edits.set_results(self._graph, [])
        done = replace_each(
            self._graph, built, fold_batch_norm, name="fold_batch_norm", keep=keep
        )
        edits.set_results(self._graph, [done.current(t) for t in results])
        reasons = {end.name: reason for end, reason in done.refused.items()}
        # Ops that were built in vain no longer count.
        Liveness(self._graph).retire(
            [t.op for end, t in built.items() if end.name in reasons], lambda op: False
        )
        return {end: op for end, op in into.items() if end.name not in reasons}, reasons

    def _note(self, fold: Fold, into: Operation) -> None:
        """Report each norm of a fold with the op that its scale went into."""
        prefix, layer = self._place.prefix, fold.layer.op
        for built in fold.norms:
            norms, end = self._moved.get(built.result.op, ((built,), into))
            while end in self._stands_for:
                end = self._stands_for[end]
            self._folded += [
                Folded(
                    prefix + norm.name,
                    prefix + layer.name,
                    layer.type,
                    prefix + end.name,
                    fold.forward,
                    self._place.signature,
                )
                for norm in norms
            ]


def _stated(before: Obstacle) -> str:
    """Return the op before a norm as the end of a sentence."""
    if not before.op.inputs:
        return "no layer comes before the norm"
    return f"'{before.op.name}' {before.reason}"


def _in_the_way(refused: Iterable[Refusal]) -> list[Operation]:
    """Return the obstacles that can be replaced by a layer itself, or by its result."""
    ops = dict.fromkeys(obstacle.op for _, obstacle in refused)
    return [op for op in ops if is_convolution_call(op) or stacked_item(op) is not None]


def _cleared(op: Operation) -> Tensor:
    item = stacked_item(op)
    return inlined_convolution(op) if item is None else item


def _standing_in(
    end: Operation, folds: Mapping[Operation, Fold], into: Mapping[Operation, Operation]
) -> Operation:
    """Return the replacement of a fold, or that of a fold that includes it."""
    while end not in into:
        end = next(
            other
            for other, fold in folds.items()
            if other is not end and any(link.op is end for link in fold.links)
        )
    return into[end]


def _choices_in(place: Place, choices: Choices) -> tuple[Choices, str]:
    """Return the choices for a place, and why nothing is folded in it, or nothing."""
    scope, prefix = choices.scope, place.prefix
    if scope is None or types.is_in_scope(prefix, scope):
        return replace(choices, scope=None), place.fixed
    inside = tuple(s.removeprefix(prefix) for s in scope if s.startswith(prefix))
    if inside:
        return replace(choices, scope=inside), place.fixed
    reason = f"is outside of scope {types.quoted(scope)}"
    return replace(choices, scope=None), reason
