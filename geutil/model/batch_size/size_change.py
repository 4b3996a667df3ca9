"""The batch size of a model, changed: planned and carried out.

The walk through functions (calls, conditionals, loops) stands here, since the plan
changes their definitions; `walk` goes over the ops of one graph.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from geutil.errors import ModelError, TransformError, Words
from geutil.graph import op_types, protos, shape_inference
from geutil.graph.op_types import ENTERS, LOOPS, SWITCHES
from geutil.graph.types import Tensor
from geutil.graph.walks import control_references, node_name
from geutil.model.batch_size import batch_edits, verification
from geutil.model.batch_size.batch_edits import (
    BatchObstacle,
    BatchPlan,
    Broadcast,
    CallAnew,
    NodeWriter,
    Scope,
    Shape,
    Sizes,
    choose_probe,
    first_row,
    scope_of_function,
    scope_of_graph,
    shape_of,
)
from geutil.model.batch_size.row_loops import row_loop
from geutil.model.batch_size.sites import (
    REFUSALS,
    Probing,
    Site,
    attribute_of_shape,
    broadcast_for_batch,
)
from geutil.model.batch_size.walk import Walk, walk, walk_loops
from geutil.model.core import EditableModel, M
from geutil.model.programs import ModelProgram, fresh_name, nodes_by_name, set_constant

_OPAQUE = (tf.resource, tf.variant)
"""Handles: their shapes say nothing about the values that they refer to."""


@dataclass(frozen=True)
class _NamedFunction:
    """A function as a node names it."""

    attribute: str | None
    position: int
    name: str


@dataclass
class _FunctionWalk:
    """A walk through a function."""

    callee: _NamedFunction
    done: Walk
    results: list[Tensor]


def _match_result(site: Site, called: _FunctionWalk, index: int, like: Tensor) -> None:
    """Repeat a function's result for the batch where `like` has the batch."""
    probing, result = site.probing, called.results[index]
    axis, shape, like_shape = probing.axis(like), shape_of(result), shape_of(like)
    if (
        axis is None
        or probing.axis(result) is not None
        or shape is None
        or len(shape) != len(like_shape or ())
        or probing.grows(result)
    ):
        return
    dim = (like_shape or ())[axis] or 0
    if shape[axis] != site.sizes.before(dim) or called.done.source is None:
        return
    inner = site.inside(called.done.source)
    broadcast = broadcast_for_batch(
        inner, result, index, axis, site.sizes.factor(dim), result=True
    )
    if broadcast is not None:
        edit, called.results[index] = broadcast
        called.done.plan.edits.append(edit)


def _stand_in(probing: Probing, tensors: Sequence[Tensor]) -> Tensor:
    return probing.placeholder(tensors[0].dtype, _common(tensors), like=list(tensors))


def _merged(probing: Probing, tensors: Sequence[Tensor]) -> Tensor:
    """Return a representative of several tensors, one of which it is."""
    if tensors[0].dtype in _OPAQUE:
        grown = [t for t in tensors if probing.grows(t)]
        return (grown or list(tensors))[0]
    return _stand_in(probing, tensors)


def _common(tensors: Sequence[Tensor]) -> Shape:
    shapes = [shape_of(t) for t in tensors]
    known_shapes = [s for s in shapes if s is not None]
    if len(known_shapes) < len(shapes) or len({len(s) for s in known_shapes}) != 1:
        return None
    return tuple(
        dims[0] if len(set(dims)) == 1 else None
        for dims in zip(*known_shapes, strict=True)
    )


_Body = Callable[[Site, Sequence[Tensor]], _FunctionWalk]
"""Walks through a loop's body with its variables."""


@dataclass
class _Settled:
    """A loop whose variables keep their shapes."""

    site: Site
    state: list[Tensor]
    called: _FunctionWalk  # The walk through its body with these.
    earlier: list[BatchObstacle]
    lost: bool  # Whether less is known of a variable's shape than at the start.

    @property
    def problems(self) -> list[BatchObstacle]:
        """The problems that cannot be mended."""
        return [*self.called.done.plan.all_problems(), *self.site.plan.problems]

    @property
    def sound(self) -> bool:
        """Return whether nothing speaks against it."""
        return not self.problems and not (self.earlier and self.lost)


def _settle(site: Site, body: _Body, fixed: frozenset[int]) -> _Settled:
    """Find out which of a loop's variables have to have the batch."""
    # A variable that has it after an iteration gets it from the start. Where that leads
    # nowhere, since the first iteration already fails, those get it that start with
    # equal rows, as many as the old batch had. The changes of the result's site are to
    # be adopted.
    settled = _rounds(site.attempt(), body, fixed)
    if settled.sound:
        return settled
    guess = site.attempt()
    guessed = _guess(guess, fixed)
    if guessed:
        other = _rounds(guess, body, fixed)
        keeps_batch = all(site.probing.axis(other.state[i]) == 0 for i in guessed)
        if keeps_batch and other.sound:
            return other
    if settled.lost:
        settled.site.plan.problems += settled.earlier
    return settled


def _guess(site: Site, fixed: frozenset[int]) -> list[int]:
    """Repeat for the batch each start value that looks as if it had it."""
    guessed = []
    for index, t in enumerate(site.operands):
        shape = shape_of(t)
        if index in fixed or t.dtype in _OPAQUE or not shape or site.probing.grows(t):
            continue
        equal = shape[0] == site.sizes.old and site.probing.rows_are_equal(t, 0)
        if equal and site.broadcast(index, 0, 1):
            guessed.append(index)
    return guessed


def _rounds(site: Site, body: _Body, fixed: frozenset[int]) -> _Settled:
    """Walk through a body until the variables keep their shapes."""
    # In each round a variable gains the batch, or loses facts of its shape.
    probing = site.probing
    start = [
        t
        if i in fixed or t.dtype in _OPAQUE
        else probing.placeholder(t.dtype, shape_of(t), like=[t])
        for i, t in enumerate(site.operands)
    ]
    state, problems = start, list[BatchObstacle]()
    while True:
        called = body(site, state)
        after = []
        for index, t in enumerate(state):
            if index in fixed:
                after.append(t)
            elif t.dtype in _OPAQUE:
                after.append(called.results[index])
            else:
                _match_result(site, called, index, t)
                after.append(_next_state(site, index, t, called.results[index]))
        pairs = list(zip(state, after, strict=True))
        state = after
        if all(
            shape_of(a) == shape_of(b) and probing.grows(a) == probing.grows(b)
            for a, b in pairs
        ):
            lost = any(_vaguer(a, b) for a, b in zip(start, state, strict=True))
            return _Settled(site, state, called, problems, lost)
        problems += called.done.plan.all_problems()


def _vaguer(before: Tensor, after: Tensor) -> bool:
    """Return whether less is known of a shape."""
    old, new = shape_of(before), shape_of(after)
    if old is None or new is None:
        return old is not None
    return any(a is not None and b is None for a, b in zip(old, new, strict=False))


def _next_state(site: Site, index: int, before: Tensor, result: Tensor) -> Tensor:
    """Return the state of a variable, given those before and after an iteration."""
    probing = site.probing
    shape, grown = shape_of(before), shape_of(result)
    axis = probing.axis(result)
    if (
        axis is not None
        and shape is not None
        and len(shape) == len(grown or ())
        and probing.axis(before) is None
        and shape[axis] == site.sizes.before((grown or ())[axis] or 0)
        and not probing.grows(site.operands[index])
    ):
        factor = site.sizes.factor((grown or ())[axis])
        if site.broadcast(index, axis, factor):
            return site.operands[index]
    return _merged(probing, [before, result])


_BRANCHES = {
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "Case": ("branches",),
    "StatelessCase": ("branches",),
}


def _through_calls(site: Site, active: tuple[str, ...]) -> list[Tensor] | None:
    """Walk through the callees of an op, and return its outputs; None without any."""
    op = site.node.op
    if op in site.probing.library:
        return _plain(site, _NamedFunction(None, 0, op), active)
    if op in op_types.CALLS:
        return _plain(site, _callees(site, "f")[0], active)
    if op in _BRANCHES:
        callees = [c for name in _BRANCHES[op] for c in _callees(site, name)]
        return _conditional(site, callees, active)
    if op in op_types.LOOPS:
        return _loop(site, active)
    if any(site.probing.grows(t) for t in site.operands):
        inner = [
            n
            for n in protos.functions_of_attributes(site.node.attr)
            if n in site.probing.library
        ]
        if inner:
            site.problem(
                f"it calls {inner}, and what {op} does with them is not known",
                "cut the model around it",
            )
    return None


def _callees(site: Site, attribute: str) -> list[_NamedFunction]:
    value = site.node.attr[attribute]
    functions = [value.func] if value.HasField("func") else value.list.func
    return [_NamedFunction(attribute, i, f.name) for i, f in enumerate(functions)]


def _call(
    site: Site, callee: _NamedFunction, args: Sequence[Tensor], active: tuple[str, ...]
) -> _FunctionWalk:
    """Walk through the body of a function that an op calls with some arguments."""
    library = site.probing.library
    if callee.name in active:
        raise TransformError(f"function '{callee.name}' calls itself")
    if callee.name not in library:
        raise TransformError(f"function '{callee.name}' is not in the graph")
    attributes = site.node.attr
    # The attributes that a body leaves open are those of the node if the function
    # is the node's type, else those in the attribute that names it.
    if callee.attribute is not None:
        value = attributes[callee.attribute]
        functions = [value.func] if value.HasField("func") else value.list.func
        attributes = functions[callee.position].attr
    scope = scope_of_function(library[callee.name], library, dict(attributes))
    feeds = dict(zip(scope.args, args, strict=True))
    done = walk(scope, feeds, site.probing, _through_calls, (*active, callee.name))
    results = [done.values[name] for name in scope.results]
    return _FunctionWalk(callee, done, results)


def _commit(site: Site, called: _FunctionWalk) -> None:
    """Take the changes of a function over, if anything in it depends on the batch."""
    plan = called.done.plan
    if plan.edits or plan.growing or plan.problems:
        callee = called.callee
        site.edit(
            CallAnew(
                site.node.name, callee.attribute, callee.position, callee.name, plan
            )
        )


def _plain(site: Site, callee: _NamedFunction, active: tuple[str, ...]) -> list[Tensor]:
    called = _call(site, callee, site.operands, active)
    _commit(site, called)
    return called.results


def _conditional(
    site: Site, callees: Sequence[_NamedFunction], active: tuple[str, ...]
) -> list[Tensor]:
    branches = [_call(site, c, site.operands[1:], active) for c in callees]
    outputs = []
    for index, parallel in enumerate(zip(*(b.results for b in branches), strict=True)):
        for branch in branches:
            for other in parallel:
                _match_result(site, branch, index, other)
        together = [branch.results[index] for branch in branches]
        outputs.append(_merged(site.probing, together))
    for branch in branches:
        _commit(site, branch)
    _record_shapes(site, outputs)
    return outputs


def _loop(site: Site, active: tuple[str, ...]) -> list[Tensor]:
    """Walk through a loop until the shapes of its state _settle; return its outputs."""
    (condition,), (body,) = _callees(site, "cond"), _callees(site, "body")
    fixed = _passed_through(site, body)
    rows = row_loop(site, _scope(site, condition), _scope(site, body))
    settled = _settle(site, lambda at, state: _call(at, body, state, active), fixed)
    site.adopt(settled.site)
    asked = _call(site, condition, settled.state, active)
    asked.done.plan.edits += rows.edits
    _commit(site, asked)
    _commit(site, settled.called)
    outputs = [
        t
        if t.dtype in _OPAQUE or i in fixed
        else site.probing.placeholder(t.dtype, shape_of(t), like=[t])
        for i, t in enumerate(settled.state)
    ]
    for index in rows.lists:
        site.probing.mark_list_of_rows(outputs[index])
    _record_shapes(site, outputs)
    return outputs


def _scope(site: Site, callee: _NamedFunction) -> Scope:
    """Return the scope of a function that a loop calls."""
    library = site.probing.library
    attributes = dict(site.node.attr[callee.attribute or ""].func.attr)
    return scope_of_function(library[callee.name], library, attributes)


def _passed_through(site: Site, body: _NamedFunction) -> frozenset[int]:
    """Return the loop variables that the body returns as they are."""
    library = site.probing.library
    if body.name not in library:
        return frozenset()
    scope = _scope(site, body)
    pairs = zip(scope.args, scope.results, strict=True)
    copies = {
        f"{e.node.name}:0": e.inputs[0]
        for e in scope.entries
        if e.node.op == "Identity"
    }
    return frozenset(
        i for i, (a, r) in enumerate(pairs) if a == r or copies.get(r) == a
    )


def _record_shapes(site: Site, outputs: Sequence[Tensor]) -> None:
    """Rewrite the recorded shapes of a loop's or conditional's outputs."""
    if not site.node.attr["output_shapes"].list.shape:
        return
    value = tf.compat.v1.AttrValue()
    for t, old in zip(outputs, site.node.attr["output_shapes"].list.shape, strict=True):
        if t.dtype in _OPAQUE or not site.probing.grows(t):
            value.list.shape.add().CopyFrom(old)
        else:
            value.list.shape.add().CopyFrom(
                tf.TensorShape(_new_shape(site, t)).as_proto()
            )
    site.set_attribute("output_shapes", value)


def _new_shape(site: Site, t: Tensor) -> Shape:
    """Return a shape with the new batch size."""
    shape = shape_of(t)
    if shape is None:
        return None
    new = site.sizes.new
    return tuple(
        d
        if not d or not site.sizes.factor(d)
        else None
        if new is None
        else new * site.sizes.factor(d)
        for d in shape
    )


_numbers = itertools.count()
_NAMED = Words("name those whose first axis is the batch with inputs=[...]")
_FRAMES = ENTERS | SWITCHES


def _fixed_graph_def(graph_def: Any, plan: BatchPlan, new: int | None) -> Any:
    """Return a copy of a graph with the changes of a plan."""
    # The recorded shapes of growing nodes are dropped. Functions that change are copied
    # under new names: other callers keep the old ones.
    result = type(graph_def)()
    result.CopyFrom(graph_def)
    bodies = {f.signature.name: f for f in graph_def.library.function}
    writer = NodeWriter(result.node, function=False, new=new)
    calls = _apply(plan, result.node, writer)
    for edit, node in calls:
        function = result.library.function.add()
        function.CopyFrom(bodies[edit.function])
        function.signature.name = f"{edit.function}_batch_{next(_numbers)}"
        _call_anew(node, edit, function.signature.name)
        calls += _apply_to_function(function, edit.plan, new)
    return result


def _apply_to_function(
    function: Any, plan: BatchPlan, new: int | None
) -> list[tuple[CallAnew, Any]]:
    args = [arg.name for arg in function.signature.input_arg]
    writer = NodeWriter(function.node_def, function=True, new=new, used_names=args)
    for attributes in function.arg_attr.values():
        attributes.attr.pop("_output_shapes", None)
    function.attr.pop("_input_shapes", None)
    for edit in plan.edits:
        if isinstance(edit, Broadcast) and edit.node is None:
            result = function.signature.output_arg[edit.index].name
            source = function.ret[result]
            function.ret[result] = _broadcast(writer, edit, result, source, ())
    return _apply(plan, function.node_def, writer)


def _apply(
    plan: BatchPlan, nodes: Any, writer: NodeWriter
) -> list[tuple[CallAnew, Any]]:
    """Change nodes; return the calls whose functions are to be changed next."""
    by_name = {node.name: node for node in nodes}
    framed = any(node.op in _FRAMES for node in nodes)
    # The recorded shapes hold the old batch size.
    for name in plan.growing:
        by_name[name].attr.pop("_output_shapes", None)
    calls = []
    for edit in plan.edits:
        if edit.node is None:
            continue
        node = by_name[edit.node]
        if isinstance(edit, CallAnew):
            calls.append((edit, node))
        else:
            _change(edit, node, by_name, writer, framed)
    return calls


def _change(
    edit: batch_edits.Edit,
    node: Any,
    by_name: dict[str, Any],
    writer: NodeWriter,
    framed: bool,
) -> None:
    name = f"{node.name}/batch_size"
    if isinstance(edit, batch_edits.SetAttribute):
        node.attr[edit.name].CopyFrom(edit.value)
    elif isinstance(edit, batch_edits.BiasToAdd):
        # As an Identity of the sum it keeps the names of the node and of its output.
        dtype = node.attr["T"].type
        terms = [(node.input[0], dtype), (edit.bias, dtype)]
        total = writer.write(name, lambda x, y: tf.raw_ops.AddV2(x=x, y=y), terms)
        node.op = "Identity"
        node.attr.pop("data_format", None)
        node.input[:] = [total, *control_references(node.input)]
    elif isinstance(edit, batch_edits.SetConstant):
        after = _controls(by_name.get(node_name(node.input[edit.index])))
        dtype = tf.as_dtype(edit.value.dtype).as_datatype_enum
        node.input[edit.index] = writer.constant(name, edit.value, dtype, after)
    elif isinstance(edit, batch_edits.SetElements):
        pack = by_name[node_name(edit.pack)]
        parts = list(pack.input)
        dtype = pack.attr["T"].type
        for index, value in edit.elements:
            after = _controls(by_name.get(node_name(parts[index])))
            parts[index] = writer.constant(f"{name}/dim_{index}", value, dtype, after)
        node.input[edit.index] = writer.write(
            name,
            lambda *scalars: tf.raw_ops.Pack(values=scalars),
            [(part, dtype) for part in parts],
        )
    elif isinstance(edit, batch_edits.SetDims):
        after = [f"^{node_name(edit.source.tensor)}"] if framed else []
        node.input[edit.index] = writer.dims(
            name, edit.dims, edit.source, edit.dtype, after
        )
    elif isinstance(edit, batch_edits.SetSize):
        after = [f"^{node_name(edit.source.tensor)}"] if framed else []
        size = writer.size(name, edit.source, after)
        if edit.frame is not None:
            enter = functools.partial(
                tf.raw_ops.Enter, frame_name=edit.frame, is_constant=True
            )
            number = [(size, tf.int32.as_datatype_enum)]
            size = writer.write(name, lambda t: enter(data=t), number)
        node.input[edit.index] = size
    elif isinstance(edit, Broadcast):
        source = node.input[edit.index]
        after = [f"^{node_name(source)}"] if framed else []
        node.input[edit.index] = _broadcast(writer, edit, name, source, after)


def _controls(node: Any) -> list[str]:
    """Return the control inputs of a constant that is replaced."""
    return [] if node is None else control_references(node.input)


def _broadcast(
    writer: NodeWriter,
    edit: Broadcast,
    name: str,
    tensor: str,
    after: Iterable[str],
) -> str:
    after = list(after)
    int32 = tf.int32.as_datatype_enum
    shape = writer.dims(f"{name}/shape", edit.dims, edit.source, int32, after)

    def repeated(t: Tensor, shape: Tensor) -> Tensor:
        row = t if edit.rows == 1 else first_row(t, edit.axis, len(edit.dims))
        return tf.raw_ops.BroadcastTo(input=row, shape=shape)

    return writer.write(name, repeated, [(tensor, edit.dtype), (shape, int32)], after)


def _call_anew(node: Any, edit: CallAnew, function: str) -> None:
    if edit.attribute is None:
        node.op = function
        return
    value = node.attr[edit.attribute]
    functions = [value.func] if value.HasField("func") else value.list.func
    functions[edit.position].name = function


_logger = logging.getLogger("geutil")


def set_batch_size(
    model: M,
    size: int | None,
    *,
    inputs: Iterable[str] | None,
    samples: Mapping[str, Any] | None,
    verify: bool,
) -> M:
    """Return a model with another batch size; see `Model.set_batch_size`."""
    if size is not None and (type(size) is not int or size < 1):
        raise ModelError(f"a batch size is a positive number or None, not {size!r}")
    batched = _batched_inputs(model, inputs)
    old = _old_size(batched)
    program = model.program()
    if old is not None:
        sizes = Sizes(old, choose_probe(program.graph_def), size)
        done = _walked(model, program, batched, sizes)
        _refuse(model, done.plan, size)
        for edit in done.plan.edits:
            _logger.debug("batch size %s of %r: %s", size, model, edit)
        program.graph_def = _fixed_graph_def(program.graph_def, done.plan, size)
    else:
        growing = BatchPlan(growing={n.name for n in program.graph_def.node})
        program.graph_def = _fixed_graph_def(program.graph_def, growing, size)
    _set_placeholders(program, batched, size)
    if size is not None:
        _close_lists(program)
    # The graph on trial is one by itself: a refusal leaves no trace.
    changed = _derived(model, program, size)
    if verify:
        verification.prove(model, changed, list(batched), old, size, samples)
    return changed


def _batched_inputs(
    model: EditableModel, names: Iterable[str] | None
) -> dict[str, Tensor]:
    """Return the inputs whose first axis is the batch."""
    input_names = list(model.inputs)
    if names is None:
        for name, t in model.inputs.items():
            if t.shape.rank is None:
                raise ModelError(
                    f"input '{name}' has an unknown rank, so there is no telling "
                    "whether it has a batch axis",
                    remedy=_NAMED,
                )
        names = [name for name, t in model.inputs.items() if t.shape.rank]
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        if name not in model.inputs:
            raise ModelError(
                f"there is no input '{name}'; the inputs are {input_names}"
            )
        if not model.inputs[name].shape.rank:
            raise ModelError(
                f"input '{name}' of shape {model.inputs[name].shape} has no batch axis"
            )
    if not names:
        raise ModelError(f"{model!r} has no input with a batch axis")
    return {name: model.inputs[name] for name in names}


def _old_size(batched: Mapping[str, Tensor]) -> int | None:
    size_by_input = {name: t.shape.as_list()[0] for name, t in batched.items()}
    if len(set(size_by_input.values())) > 1:
        raise ModelError(
            f"the inputs do not agree on the batch size: {size_by_input}",
            remedy=_NAMED,
        )
    size: int | None = next(iter(size_by_input.values()))
    return size


def _walked(
    model: EditableModel,
    program: ModelProgram,
    batched: Mapping[str, Tensor],
    sizes: Sizes,
) -> Walk:
    """Walk through a model at the probing batch size."""
    library = {f.signature.name: f for f in program.graph_def.library.function}
    probing = Probing(sizes, library)
    feeds = {}
    for name, tensor in program.inputs.items():
        shape = model.inputs[name].shape
        if name in batched:
            shape = [sizes.probe, *shape.as_list()[1:]]
        feeds[tensor] = probing.placeholder(model.inputs[name].dtype, shape)
    probing.mark([feeds[program.inputs[name]] for name in model.inputs])
    variables = model.holdings.by_handle()
    for name, outside in program.captures.items():
        variable = variables.get(id(outside))
        feeds[name] = (
            # Tables and constants that are captured have no variable behind them.
            probing.placeholder(outside.dtype, outside.shape)
            if variable is None
            else probing.variable(variable.dtype, variable.shape)
        )
    try:
        scope = scope_of_graph(program.graph_def)
        return walk_loops(
            scope,
            probing,
            lambda starts: walk(scope, feeds, probing, _through_calls, starts=starts),
        )
    except (*REFUSALS, TransformError) as error:
        raise ModelError(
            f"{model!r} cannot be followed with another batch size: {error}"
        ) from error


def _refuse(model: EditableModel, plan: BatchPlan, size: int | None) -> None:
    problems = plan.all_problems()
    if problems:
        listed = "\n  ".join(str(p) for p in problems)
        raise ModelError(
            f"{model!r} cannot have batch size {size}; these ops hold on to the old "
            f"one:\n  {listed}"
        )


def _set_placeholders(
    program: ModelProgram, batched: Mapping[str, Tensor], size: int | None
) -> None:
    nodes = nodes_by_name(program.graph_def)
    for name, tensor in batched.items():
        node = nodes[node_name(program.inputs[name])]
        dims = tensor.shape.as_list()
        node.attr["shape"].CopyFrom(attribute_of_shape((size, *dims[1:])))
        node.attr.pop("_output_shapes", None)


def _close_lists(program: ModelProgram) -> None:
    """Write the shapes of the elements of lists that follow now, and those of loops."""
    # TensorFlow needs no such shape; TFLite's converter takes no list without.
    graph_def = type(program.graph_def)()
    graph_def.CopyFrom(program.graph_def)
    if not any(node.op in LOOPS for node in graph_def.node):
        return
    graph = shape_inference.inferred_graph(graph_def)
    nodes = nodes_by_name(program.graph_def)
    handles: dict[tuple[str, int], Tensor] = {}
    for op in graph.get_operations():
        if op.type == "TensorListStack":
            handles[op.name, 1] = op.inputs[0]
        if op.type in LOOPS:
            shapes = [attribute_of_shape(t.shape).shape for t in op.outputs]
            value = nodes[op.name].attr["output_shapes"].list
            value.ClearField("shape")
            value.shape.extend(shapes)
            # A list is known by what the loop puts into it.
            pairs = zip(op.inputs, op.outputs, strict=True)
            made = [(t.op, t_) for t, t_ in pairs if t.op.type == "TensorListReserve"]
            handles |= {(o.name, 0): t_ for o, t_ in made}
    for (name, index), handle in handles.items():
        (content,) = shape_inference.behind([handle])
        if content is not None and content.shape.is_fully_defined():
            constant = program.graph_def.node.add()
            constant_name = fresh_name(nodes, f"{name}/element_shape")
            dims = tf.constant(content.shape.as_list(), tf.int32)
            set_constant(constant, constant_name, dims)
            nodes[constant_name] = constant
            nodes[name].input[index] = constant_name
            if "shape_type" in nodes[name].attr:
                nodes[name].attr["shape_type"].type = tf.int32.as_datatype_enum


def _derived(model: M, program: ModelProgram, size: int | None) -> M:
    try:
        return model.derived(program)
    except ModelError as error:
        raise ModelError(f"{model!r} cannot have batch size {size}: {error}") from error
