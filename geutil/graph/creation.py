"""New ops: of node definitions, in the place of another op, in groups like each other.

The bulk road is `tf.import_graph_def`: C++ makes the ops, eight times as fast as Python
does one by one. Attributes and edges that the import loses or refuses are restored
here: exact device strings, colocation, control inputs from outside, and whatever
surrounds the caller (scopes, devices, control dependencies) leaves no mark on the ops.

A group of ops is traced once, as a function of tensors; each use of it is a copy of its
nodes under another name. All uses are imported together, which takes some 40 us an op,
where making ops one by one takes 300.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from geutil.errors import TransformError
from geutil.graph import _tf, adjacency, op_types, types
from geutil.graph.protos import AttrValue, GraphDef, op_def_of
from geutil.graph.types import Graph, Operation, Tensor, require_tensor

_PREFIX = "geph"


def placeholder_name(
    t: Tensor | None = None, scope: str | None = None, prefix: str = _PREFIX
) -> str:
    """Return a name for a placeholder that replaces `t`.

    "geph" is short for "graph editor placeholder": the prefix marks such ops.

    Args:
        t: the tensor; None gives the bare prefix.
        scope: absolute scope of the name; None keeps the scope of `t`, "" is the root.
        prefix: the prefix.

    Raises:
        ArgumentTypeError: `t` is neither None nor a tensor of a graph.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     t = tf.constant(1.0, name="foo/x")
        >>> ge.placeholder_name(t), ge.placeholder_name(t, scope="bar")
        ('foo/geph__x_0', 'bar/geph__x_0')
    """
    if t is None:
        return types.scope_finalize(scope or "") + prefix
    require_tensor(t)
    if scope is None:
        scope = types.scope_dirname(t.op.name)
    base = types.scope_basename(t.op.name)
    # The stand-in of a stand-in needs no second prefix.
    if not base.startswith(f"{prefix}__"):
        base = f"{prefix}__{base}_{t.value_index}"
    return types.scope_finalize(scope) + base


def make_placeholder_from_tensor(
    t: Tensor, scope: str | None = None, prefix: str = _PREFIX
) -> Tensor:
    """Make a placeholder with the dtype and shape of `t` in the default graph.

    Args:
        t: the tensor that it replaces.
        scope: absolute scope of its name; None keeps that of `t`, "" is the root.
        prefix: prefix of its name.

    Returns:
        A new tensor, named by `placeholder_name`.

    Raises:
        ArgumentTypeError: `t` is not a tensor of a graph.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     t = tf.zeros([2, 3], name="x")
        ...     ge.make_placeholder_from_tensor(t)
        <tf.Tensor 'geph__x_0:0' shape=(2, 3) dtype=float32>
    """
    require_tensor(t)
    result = _placeholder(t.dtype, t.shape, placeholder_name(t, scope, prefix))
    copy_handle_data(t, result)
    return result


def make_placeholder_from_dtype_and_shape(
    dtype: Any, shape: Any = None, scope: str | None = None, prefix: str = _PREFIX
) -> Tensor:
    """Make a placeholder in the default graph; `geutil.ph` is the same function.

    Args:
        dtype: its type.
        shape: its shape; None leaves it unknown.
        scope: absolute scope of its name.
        prefix: its name inside the scope.

    Returns:
        A new tensor.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     ge.ph(tf.float32, [None, 3], scope="foo")
        <tf.Tensor 'foo/geph:0' shape=(None, 3) dtype=float32>
    """
    return _placeholder(dtype, shape, placeholder_name(scope=scope, prefix=prefix))


def _placeholder(dtype: Any, shape: Any, name: str) -> Tensor:
    # A placeholder feeds from outside: nothing around the caller may order it or put
    # it into a loop. The name is absolute, so the current scope is left. A device that
    # the caller asks for is meant.
    graph = tf.compat.v1.get_default_graph()
    with graph.control_dependencies(None), graph.name_scope(None):
        return tf.compat.v1.placeholder(tf.as_dtype(dtype).base_dtype, shape, name)


def copy_handle_data(source: Tensor, target: Tensor) -> None:
    """Give a resource or variant placeholder the shape and dtype behind the handle."""
    if source.dtype in (tf.resource, tf.variant):
        _tf.copy_handle_data(source, target)


BULK_LIMIT = 2**31 - 1
"""Bytes that one protobuf can hold, and with it one bulk import."""


@contextmanager
def neutral(graph: Graph) -> Iterator[None]:
    """Make `graph` the default one, outside scopes, devices and dependencies."""
    with ExitStack() as stack:
        if tf.compat.v1.get_default_graph() is not graph:
            stack.enter_context(graph.as_default())
        stack.enter_context(graph.name_scope(None))
        # Every new op looks at each of these stacks: an empty one is left empty.
        if graph._control_dependencies_stack:
            stack.enter_context(graph.control_dependencies(None))
        if graph._colocation_stack.peek_objs():
            stack.enter_context(graph.colocate_with(None, ignore_existing=True))
        if graph._device_function_stack.peek_objs():
            stack.enter_context(graph.device(None))
        context = graph._get_control_flow_context()
        graph._set_control_flow_context(None)
        try:
            yield
        finally:
            graph._set_control_flow_context(context)


@contextmanager
def _contexts_hidden(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Hide the loops of tensors from TensorFlow's check of new ops' inputs."""
    # A new op reads them before it can be told that it is part of the loop as well.
    hidden = {}
    for op in dict.fromkeys(t.op for t in tensors):
        context = op._get_control_flow_context()
        if context is not None:
            hidden[op] = context
            op._set_control_flow_context(None)
    try:
        yield
    finally:
        for op, context in hidden.items():
            op._set_control_flow_context(context)


def new_graph() -> Graph:
    """Return an empty graph."""
    return tf.Graph()


def new_graph_def(source: Graph) -> Any:
    """Return an empty `GraphDef` with the versions of `source`."""
    graph_def = GraphDef()
    graph_def.versions.CopyFrom(source.graph_def_versions)
    return graph_def


def graph_def_of(graph: Graph, ops: Sequence[Operation]) -> Any:
    """Return a `GraphDef` with the nodes of `ops`, in this order, and no functions."""
    # Most of a graph is taken from its own GraphDef: 2 us an op in place of 5.
    everything = graph.get_operations()
    graph_def = new_graph_def(graph)
    if 2 * len(ops) < len(everything):
        graph_def.node.extend(op.node_def for op in ops)
        return graph_def
    try:
        whole = graph.as_graph_def()
    except (
        Exception
    ):  # A graph of over 2 GiB has none; TensorFlow raises what it likes.
        graph_def.node.extend(op.node_def for op in ops)
        return graph_def
    if len(ops) == len(everything):
        whole.ClearField("library")
        if everything != list(ops):
            # The nodes are in the order of the ops, and sort asks for keys in order.
            place = {op: i for i, op in enumerate(ops)}
            places = iter([place[op] for op in everything])
            whole.node.sort(key=lambda _: next(places))
        return whole
    nodes = {node.name: node for node in whole.node}
    graph_def.node.extend(nodes[op.name] for op in ops)
    return graph_def


def step_graph_def(
    graph: Graph, ops: Sequence[Operation], feeds: Iterable[Tensor]
) -> Any:
    """Return a self-contained `GraphDef` of ops."""
    # A placeholder stands in the place of a tensor that is fed, and a variable in the
    # place of a handle that a function captures. Colocation is left out.
    graph_def = graph_def_of(graph, ops)
    graph_def.library.CopyFrom(graph.as_graph_def().library)
    fed = {_reference(t): t for t in feeds if t.op.type not in op_types.PLACEHOLDERS}
    stand_ins = {name: _stand_in(graph_def, t) for name, t in fed.items()}
    for node, op in zip(graph_def.node, ops, strict=False):
        if stand_ins:
            for i, name in enumerate(node.input):
                # An op whose inputs were set anew writes a first output with its index.
                node.input[i] = stand_ins.get(name.removesuffix(":0"), name)
        if op.type in op_types.PLACEHOLDERS and op.outputs[0].dtype == tf.resource:
            _make_variable(node, op.outputs[0])
    return graph_def


def _reference(tensor: Tensor) -> str:
    """Return how a node names the tensor among its inputs."""
    name = tensor.op.name
    return f"{name}:{tensor.value_index}" if tensor.value_index else name


def _stand_in(graph_def: Any, tensor: Tensor) -> str:
    name = f"{tensor.op.name}_fed_{tensor.value_index}"
    node = graph_def.node.add(name=name, op="Placeholder")
    node.attr["dtype"].type = tensor.dtype.base_dtype.as_datatype_enum
    node.attr["shape"].shape.CopyFrom(tensor.shape.as_proto())
    return name


def _make_variable(node: Any, handle: Tensor) -> None:
    """Turn the placeholder of a captured handle into a variable's own op."""
    data = _tf.get_resource_handle_data(handle)
    behind = list(data.shape_and_type) if data is not None and data.is_set else []
    # The handle of a table has two entries, of keys and of values.
    if len(behind) != 1:
        return
    node.op = "VarHandleOp"
    node.attr.clear()
    node.attr["dtype"].CopyFrom(AttrValue(type=behind[0].dtype))
    node.attr["shape"].shape.CopyFrom(behind[0].shape)
    node.attr["shared_name"].s = node.name.encode()


def import_ops(
    graph: Graph, graph_def: Any, input_map: Mapping[str, Tensor], scope: str = ""
) -> list[Operation]:
    """Make the ops of `graph_def` in `graph`."""
    # The nodes are in topological order (loop back edges aside), without `_class`
    # attributes. `input_map` has a tensor for each name of an outside input; `scope`
    # ends in a slash.
    before = len(graph.get_operations())
    with neutral(graph), _contexts_hidden(input_map.values()):
        tf.import_graph_def(graph_def, input_map=dict(input_map), name=scope)
    # The importer takes, of the nodes that are ready, the one that is listed first;
    # listed in topological order, they come out in that order.
    ops: list[Operation] = graph.get_operations()[before:]
    return ops


def set_device(op: Operation, device: str) -> None:
    """Set the device string of `op`, exactly as given."""
    if op.device != device:
        op._set_device_from_string(device)


def add_control_edges(op: Operation, control_inputs: Sequence[Operation]) -> None:
    """Make a new op wait for ops; unlike an edit this cannot close a cycle."""
    op._add_control_inputs(list(control_inputs))


def set_control_inputs(op: Operation, control_inputs: Sequence[Operation]) -> None:
    """Set the control inputs of an op that was made just now."""
    op._remove_all_control_inputs()
    op._add_control_inputs(list(control_inputs))


def set_new_input(op: Operation, index: int, tensor: Tensor) -> None:
    """Set an input of an op that was made just now."""
    op._update_input(index, tensor)


def set_element_type(op: Operation, dtype: tf.DType) -> None:
    """Set the element type of an empty list."""
    op._set_attr("element_dtype", AttrValue(type=dtype.as_datatype_enum))


def make_op(graph: Graph, node_def: Any, inputs: Sequence[Tensor]) -> Operation:
    """Make one op from its definition, free of the surroundings of the caller."""
    del node_def.input[:]
    with neutral(graph), _contexts_hidden(inputs):
        op = tf.Operation.from_node_def(node_def, graph, inputs=list(inputs))
        set_device(op, node_def.device)
    return op


def make_op_like(op: Operation, op_type: str) -> Operation:
    """Make an op of another type like `op`, with the attributes that the type has."""
    definition = op_def_of(op_type)
    if definition is None:
        raise TransformError(
            f"TensorFlow has no op of type '{op_type}'; load a custom op with "
            "tf.load_op_library first"
        )
    node_def = op.node_def
    attribute_names = {attribute.name for attribute in definition.attr}
    for name in list(node_def.attr):
        if name not in attribute_names and not name.startswith("_"):
            del node_def.attr[name]
    node_def.op = op_type
    node_def.name = types.absolute_unique_name(op.graph, op.name)
    try:
        new_op = make_op(op.graph, node_def, list(op.inputs))
    # TensorFlow looks for missing inputs by index.
    except (ValueError, TypeError, IndexError) as error:
        raise TransformError(
            f"a '{op_type}' cannot stand in for '{op.name}' ({op.type}): {error}"
        ) from error
    except AssertionError as error:
        # So TensorFlow says, without a word, that inputs are left over.
        raise TransformError(
            f"a '{op_type}' cannot stand in for '{op.name}' ({op.type}): it takes "
            f"fewer inputs than {len(op.inputs)}; pass a function of them instead"
        ) from error
    add_control_edges(new_op, op.control_inputs)
    return new_op


def python_gradient(op: Operation) -> tuple[Any, Any]:
    """Return the Python gradient of an op: `(_original_op, _gradient_function)`."""
    return op._original_op, op._gradient_function


def set_python_gradient(
    op: Operation, original_op: Any, gradient_function: Any
) -> None:
    """Set the gradient that only Python keeps of an op."""
    op._original_op = original_op
    op._gradient_function = gradient_function


DERIVED = "_geutil_derived"
"""Marks ops that an edit computes parameters by: values, once these are constants."""


def set_mark(op: Operation, mark: str) -> None:
    """Mark an op in an attribute of its own, which stays in files."""
    op._set_attr(mark, AttrValue(b=True))


def clear_mark(op: Operation, mark: str) -> None:
    """Take back a mark that `set_mark` made."""
    op._clear_attr(mark)


def has_mark(op: Operation, mark: str) -> bool:
    """Return whether an op is marked, here or in the graph that it comes from."""
    try:
        return bool(op.get_attr(mark))
    except ValueError:
        return False


def capture(graph: Graph, tensor: Any) -> Tensor:
    """Return the stand-in inside the FuncGraph `graph` for a tensor from outside."""
    return graph.capture(tensor)


def make_stand_in(
    tensor: Tensor, scope: str, name: str, *, reads: Tensor | None = None
) -> Tensor:
    """Return an op whose result can be read instead of a tensor."""
    # It forwards its input, without a copy, on the tensor's device, or where that has
    # none on its reader's. No optimizer of TensorFlow removes it.
    graph, device = tensor.graph, tensor.op.device
    if not device:
        # Readers of a variable are placed with it, and have no device of their own.
        device = next((op.device for op in tensor.consumers() if op.device), "")
    with neutral(graph), graph.name_scope(f"{scope}/"), graph.device(device):
        return tf.raw_ops.PlaceholderWithDefault(
            input=tensor if reads is None else reads, shape=tensor.shape, name=name
        )


@contextmanager
def surroundings_of(
    op: Operation, control_inputs: Iterable[Operation] = ()
) -> Iterator[None]:
    """Make new ops of the block look as if they had been made beside `op`."""
    # New ops get the name scope, the device and the version 1 control-flow context of
    # `op`; nothing around the caller counts.
    graph = op.graph
    scope = types.scope_dirname(op.name)
    awaited = list(control_inputs)
    with ExitStack() as stack:
        stack.enter_context(neutral(graph))
        graph._set_control_flow_context(adjacency.control_flow_context(op))
        # Each of these takes as long as a small edit, so what is not needed is left.
        if scope:
            # One that ends in a slash is absolute.
            stack.enter_context(graph.name_scope(scope))
        if op.device:
            stack.enter_context(graph.device(op.device))
        if awaited:
            stack.enter_context(graph.control_dependencies(awaited))
        yield


def context_name(op: Operation) -> str | None:
    """Return the name of the version 1 control-flow context that `op` runs in."""
    context = adjacency.control_flow_context(op)
    return None if context is None else str(context.name)


Function = Callable[..., Any]


@dataclass(frozen=True)
class Later:
    """A tensor that does not exist yet: a result of a use of a stencil."""

    name: str  # The name that it will have.


@dataclass(frozen=True, eq=False)
class _Stencil:
    nodes: tuple[Any, ...]
    arguments: tuple[str, ...]
    results: tuple[str, ...]


class Stencils:
    """Groups of ops to be made in a graph.

    Cost: one trace for each kind of group; then linear in the ops.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.graph.creation import Stencils
        >>> with tf.Graph().as_default() as graph:
        ...     x, y = tf.constant(2.0), tf.constant(3.0)
        >>> stencils = Stencils(graph)
        >>> square = lambda t: [tf.multiply(t, t, name="product")]
        >>> (once,) = stencils.add("square", square, "a", [x])
        >>> (twice,) = stencils.add("square", square, "b", [once])
        >>> made = stencils.make()
        >>> made[once].name, made[twice].op.inputs[0].name
        ('a/product:0', 'a/product:0')
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._kinds: dict[Hashable, _Stencil] = {}
        self._graph_def = new_graph_def(graph)
        self._given: dict[str, Tensor] = {}
        self._results: list[Later] = []

    def add(
        self,
        kind: Hashable,
        function: Function,
        name: str,
        arguments: Sequence[Tensor | Later],
        device: str = "",
    ) -> list[Later]:
        """Plan one more group, of ops that `function` makes of `arguments`."""
        # Groups of one `kind` share a trace, unless dtypes or ranks of arguments
        # differ. Arguments are tensors, or results of groups planned before; `name` is
        # an unused scope.
        stencil = self._stencil(kind, function, arguments)
        names = {
            inner: self._name_of(outer)
            for inner, outer in zip(stencil.arguments, arguments, strict=True)
        }
        own = {node.name: f"{name}/{node.name}" for node in stencil.nodes}
        for node in stencil.nodes:
            new = self._graph_def.node.add()
            new.CopyFrom(node)
            new.name = own[node.name]
            new.device = device
            for index, read in enumerate(node.input):
                new.input[index] = _renamed(read, own, names)
        results = [Later(_tensor(_renamed(r, own, names))) for r in stencil.results]
        self._results += results
        return results

    def make(self) -> dict[Later, Tensor]:
        """Make all groups; return the tensor behind each result."""
        self._check_names()
        import_ops(self._graph, self._graph_def, self._given)
        get_tensor = self._graph.get_tensor_by_name
        return {later: get_tensor(later.name) for later in self._results}

    def _check_names(self) -> None:
        # TensorFlow would number the new op, and the old one be taken for it.
        op_names = {op.name for op in self._graph.get_operations()}
        for node in self._graph_def.node:
            if node.name in op_names:
                raise TransformError(
                    f"'{node.name}' is in the graph already; make the group under "
                    "another name"
                )

    def _name_of(self, tensor: Tensor | Later) -> str:
        if isinstance(tensor, Later):
            return tensor.name
        self._given[tensor.name] = tensor
        return str(tensor.name)

    def _stencil(
        self, kind: Hashable, function: Function, arguments: Sequence[Tensor | Later]
    ) -> _Stencil:
        signature = (kind, *(_signature(a) for a in arguments))
        if signature not in self._kinds:
            self._kinds[signature] = _traced(function, arguments)
        return self._kinds[signature]


def _signature(tensor: Tensor | Later) -> Hashable:
    if isinstance(tensor, Later):
        return None
    return tensor.dtype, tensor.shape.rank


def _traced(function: Function, arguments: Sequence[Tensor | Later]) -> _Stencil:
    graph = new_graph()
    with graph.as_default():
        stand_ins = [
            tf.compat.v1.placeholder(*_kind_of(a), name=f"argument_{i}")
            for i, a in enumerate(arguments)
        ]
        results = function(*stand_ins)
    names = {t.op.name for t in stand_ins}
    nodes = tuple(node for node in graph.as_graph_def().node if node.name not in names)
    return _Stencil(
        nodes, tuple(t.op.name for t in stand_ins), tuple(t.name for t in results)
    )


def _kind_of(tensor: Tensor | Later) -> tuple[Any, Any]:
    if isinstance(tensor, Later):
        return tf.float32, None
    return tensor.dtype, tensor.shape


def _renamed(name: str, own: dict[str, str], arguments: dict[str, str]) -> str:
    """Return an input of a node, or a control input, under its new name."""
    mark = "^" if name.startswith("^") else ""
    op, _, index = name.removeprefix("^").partition(":")
    if op in arguments:
        return mark + arguments[op]
    return f"{mark}{own[op]}:{index}" if index else mark + own[op]


def _tensor(name: str) -> str:
    return name if ":" in name else f"{name}:0"
