"""Folding the batch norms of a graph or model, in all its graphs and bodies.

Tracing passes constants from outside a loop or a branch to its body as arguments. In
the body a weight is then not a constant, but any value that a caller passes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import tensorflow as tf

from geutil.batchnorm.fold_graph import Folder, Place
from geutil.batchnorm.fold_plan import EXACT, Choices, Training
from geutil.batchnorm.fold_report import FoldReport, Refused
from geutil.bodies.function_bodies import OpenedFunctions
from geutil.errors import ArgumentTypeError, FoldError, GeutilError, SelectionError
from geutil.graph import creation, op_types, replicas, types
from geutil.graph.edits import undone_on_error
from geutil.graph.function_calls import callers_in
from geutil.graph.types import (
    Graph,
    IdentityMap,
    IdentitySet,
    MutableIdentityMap,
    Operation,
    Tensor,
)
from geutil.reroute.tensors import reroute_ts
from geutil.select import selections
from geutil.select.networks.layers import ROOTS


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
    passed = constants_passed(places.listed)
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
        ("statistics", statistics != EXACT),
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


SIGNS = op_types.FUSED_NORMS | ROOTS
"""Types of ops of which each batch norm has one."""


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
        if any(node.op in SIGNS for node in nodes):
            reason = f"calls a function that cannot be opened: {function.reason}"
            yield Refused(function.name, reason, function.caller.name)


Passed = list[tuple[Tensor, Operation]]
"""(argument, constant) for each argument of a body that is always the same constant."""
Sunk = list[tuple[Tensor, Tensor]]
"""(argument, constant) for each argument that is read as a constant."""


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
            if not argument.dtype.is_floating or not _readers(place, argument):
                continue
            constant = _passed(place, index, constant_by_argument)
            if constant is not None:
                constant_by_argument[argument] = constant
                listed[-1].append((argument, constant))
    return listed


def sink_constants(place: Place, passed: Passed) -> Sunk:
    """Make a body read its own copies of the constants that it is passed."""
    # Callers go on passing them.
    sunk = []
    for argument, constant in passed:
        copy = _copied(place, argument, constant)
        reroute_ts([copy], [argument], can_modify=_readers(place, argument))
        sunk.append((argument, copy))
    return sunk


def raise_constants(sunk: Sunk) -> None:
    """Make readers of sunk constants read the arguments again."""
    for argument, constant in sunk:
        reroute_ts([argument], [constant])


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


def _readers(place: Place, argument: Tensor) -> list[Operation]:
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


def _copied(place: Place, argument: Tensor, constant: Operation) -> Tensor:
    node = constant.node_def
    node.name = types.absolute_unique_name(place.graph, argument.op.name)
    node.attr.pop("_class", None)
    del node.input[:]
    with creation.neutral(place.graph):
        return creation.make_op(place.graph, node, []).outputs[0]
