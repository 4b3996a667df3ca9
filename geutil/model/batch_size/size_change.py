"""The batch size of a model, changed: planned and carried out."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from geutil.errors import ModelError, TransformError, Words
from geutil.graph import shape_inference
from geutil.graph.op_types import ENTERS, LOOPS, SWITCHES
from geutil.graph.types import Tensor
from geutil.graph.walks import control_references, node_name
from geutil.model.batch_size import batch_edits, function_walk, verification
from geutil.model.batch_size.batch_edits import (
    BatchPlan,
    Broadcast,
    CallAnew,
    NodeWriter,
    Sizes,
    choose_probe,
    first_row,
    scope_of_graph,
)
from geutil.model.batch_size.sites import REFUSALS, Probing, attribute_of_shape
from geutil.model.batch_size.walk import Walk, walk, walk_loops
from geutil.model.core import EditableModel, M
from geutil.model.programs import ModelProgram, fresh_name, nodes_by_name, set_constant

_numbers = itertools.count()
_NAMED = Words("name those whose first axis is the batch with inputs=[...]")
_FRAMES = ENTERS | SWITCHES


def fixed_graph_def(graph_def: Any, plan: BatchPlan, new: int | None) -> Any:
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
        _call(node, edit, function.signature.name)
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


def _call(node: Any, edit: CallAnew, function: str) -> None:
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
        program.graph_def = fixed_graph_def(program.graph_def, done.plan, size)
    else:
        growing = BatchPlan(growing={n.name for n in program.graph_def.node})
        program.graph_def = fixed_graph_def(program.graph_def, growing, size)
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
            lambda starts: walk(
                scope, feeds, probing, function_walk.through_calls, starts=starts
            ),
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
