"""Programs: models as protobufs with named ends; and the state that graphs share.

Every source (SavedModel, GraphDef, function, Keras model) is turned into a program, and
every program into an editable graph by the same road. Variables, tables, assets and
closures stay outside.

`tf.custom_gradient` leaves its gradient as a closure over tensors of the graph that it
was called in; a graph made from protobufs knows the closure's name alone. Here the ops
of such a graph get gradients that read their own graph's tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from geutil.bodies.inlining import NodeOrigin
from geutil.errors import ModelError, Words
from geutil.graph import functions, gradient_functions, replicas, state
from geutil.graph.keras_calls import LayerCall
from geutil.graph.types import Graph, IdentityMap, Operation, Tensor
from geutil.graph.walks import (
    closure,
    data_inputs,
    node_name,
    short_name,
    tensor_name,
    topological_order,
)
from geutil.transform import op_copies, transformer


def const_node(name: str, value: Any) -> Any:
    """Return the node of a constant; see `set_constant`."""
    node = tf.compat.v1.NodeDef()
    set_constant(node, name, value)
    return node


def placeholder(name: str, spec: Any) -> Any:
    """Return the node of a placeholder for a tensor, or a spec of one."""
    node = tf.compat.v1.NodeDef(name=name, op="Placeholder")
    node.attr["dtype"].type = spec.dtype.base_dtype.as_datatype_enum
    node.attr["shape"].shape.CopyFrom(spec.shape.as_proto())
    return node


def set_constant(node: Any, name: str, value: Any) -> None:
    """Turn a node into a constant, in place."""
    node.Clear()
    node.name, node.op = name, "Const"
    node.attr["dtype"].type = value.dtype.as_datatype_enum
    # In C++: every dtype, and floats as they are, which Python's would not keep.
    node.attr["value"].tensor.ParseFromString(tf.io.serialize_tensor(value).numpy())


def value_of_const(node: Any) -> Any:
    """Return the value of a Const node as an eager tensor."""
    dtype = tf.as_dtype(node.attr["dtype"].type)
    return tf.io.parse_tensor(node.attr["value"].tensor.SerializeToString(), dtype)


@dataclass(frozen=True)
class Ancestor:
    """A graph that nodes of a program come from, and how to find them again."""

    graph: Graph
    prefix: str = ""  # The prefix of its nodes' names in the program.
    # For tensors that others have taken the place of, the names of those in the
    # program.
    tensors: Mapping[str, str] = field(default_factory=dict)

    def tensor(self, name: str) -> str:
        """Return the name in the program of a tensor of the graph."""
        return self.tensors.get(name, f"{self.prefix}{name}")


@dataclass
class ModelProgram:
    """A graph, its ends, and its captures."""

    graph_def: Any  # The nodes and the function library.
    inputs: dict[str, str]  # For each input its placeholder's tensor name, as in `x:0`.
    outputs: dict[str, str]  # For each output its tensor name.
    # For each tensor name that corresponds to something outside, the eager tensor: the
    # handle of a variable or table, or a captured value.
    captures: dict[str, Any] = field(default_factory=dict)
    # The names of ops that run besides the ancestors of the outputs.
    side_effects: list[str] = field(default_factory=list)
    # The graphs that the nodes come from; they know the gradients that exist in Python
    # only.
    ancestors: list[Ancestor] = field(default_factory=list)
    # The calls of Keras layers that the nodes come from, where known.
    layers: tuple[LayerCall, ...] = ()

    def needed(self, more: Iterable[str] = ()) -> list[Any]:
        """Return the nodes that the ends need, and some more by name."""
        stops = [node_name(t) for t in (*self.inputs.values(), *self.captures)]
        ends = [*self.inputs.values(), *self.outputs.values(), *self.side_effects]
        return nodes_behind(self.graph_def, [*map(node_name, ends), *more], stops)

    def keep(self, nodes: Iterable[Any]) -> None:
        """Drop all nodes but some."""
        self.graph_def = subgraph(self.graph_def, nodes)
        left = {node.name for node in self.graph_def.node}
        self.captures = {t: e for t, e in self.captures.items() if node_name(t) in left}


def nodes_by_name(graph_def: Any) -> dict[str, Any]:
    """Return the nodes of a `GraphDef` by name."""
    return {node.name: node for node in graph_def.node}


def values_behind(nodes: Mapping[str, Any], ends: Iterable[str]) -> dict[str, None]:
    """Return the names of nodes and of all whose values they need, among `nodes`."""

    def known(names: Iterable[str]) -> list[str]:
        return [name for name in names if name in nodes]

    return closure(
        known(ends), lambda n: known(map(node_name, data_inputs(nodes[n].input)))
    )


def nodes_behind(
    graph_def: Any, ends: Iterable[str], stops: Iterable[str] = ()
) -> list[Any]:
    """Return the nodes that nodes called `ends` depend on, in graph order."""
    # The inputs of `stops` are left out; both ends belong to the result.
    nodes = nodes_by_name(graph_def)
    stopping = frozenset(stops)
    names = closure(
        ends, lambda n: () if n in stopping else map(node_name, nodes[n].input)
    )
    return [node for node in graph_def.node if node.name in names]


def needed_names(program: ModelProgram, ends: Iterable[str] | None = None) -> set[str]:
    """Return the names of the nodes behind tensors; all that a call runs if None."""
    if ends is None:
        ends = [*program.outputs.values(), *program.side_effects]
    stops = [node_name(t) for t in program.captures]
    behind = nodes_behind(program.graph_def, map(node_name, ends), stops)
    return {node.name for node in behind}


def nodes_ahead(
    graph_def: Any,
    starts: Iterable[str],
    *,
    until: frozenset[str] = frozenset(),
    data_only: bool = False,
) -> set[str]:
    """Return the names of nodes and of all nodes that depend on them."""
    # `until` ends the walk and is left out; with `data_only`, waiting is no dependence.
    readers: dict[str, list[str]] = {}
    for node in graph_def.node:
        if node.op not in until:
            for text in data_inputs(node.input) if data_only else node.input:
                readers.setdefault(node_name(text), []).append(node.name)
    return set(closure(starts, lambda name: readers.get(name, ())))


def cycle_of(graph_def: Any) -> list[str] | None:
    """Return the nodes on a cycle by name, first and last the same, if there is one."""
    nodes = nodes_by_name(graph_def)

    def needs(name: str) -> list[str]:
        # The back edges of loops, from NextIteration to Merge, do not count.
        sources = map(node_name, nodes[name].input)
        return [source for source in sources if "NextIteration" not in nodes[source].op]

    cycles: list[list[str]] = []
    topological_order(nodes, needs, cycles.append)
    return [cycles[0][0], *reversed(cycles[0])] if cycles else None


def subgraph(graph_def: Any, nodes: Iterable[Any]) -> Any:
    """Return a `GraphDef` with these nodes and the functions of `graph_def`."""
    result = tf.compat.v1.GraphDef()
    result.node.extend(nodes)
    result.versions.CopyFrom(graph_def.versions)
    result.library.CopyFrom(graph_def.library)
    return result


def fresh_name(used_names: Mapping[str, Any] | set[str], name: str) -> str:
    """Return `name`, or the first of `name_1`, `name_2`, ... that is not taken."""
    if name not in used_names:
        return name
    number = 1
    while f"{name}_{number}" in used_names:
        number += 1
    return f"{name}_{number}"


def take_name(used_names: set[str], name: str) -> str:
    """Return a fresh name, and add it to those that are used."""
    fresh = fresh_name(used_names, name)
    used_names.add(fresh)
    return fresh


def legal_name(name: str) -> str:
    """Return a name for a node that resembles `name`."""
    legal = "".join(
        c if c.isascii() and (c.isalnum() or c in "_.-/") else "_" for c in name
    )
    return legal if legal[:1].isalnum() or legal[:1] == "." else f"n{legal}"


def redirect(program: ModelProgram, stand_ins: Mapping[str, str]) -> None:
    """Make every reader of some tensors read other ones, in place."""
    # Ops that waited for the op of such a tensor no longer do.
    tensors = {tensor_name(old): tensor_name(new) for old, new in stand_ins.items()}
    texts = {short_name(old): short_name(new) for old, new in tensors.items()}
    nodes = {f"^{node_name(old)}" for old in tensors}
    for node in program.graph_def.node:
        if any(text in texts or text in nodes for text in node.input):
            inputs = [texts.get(t, t) for t in node.input if t not in nodes]
            node.input[:] = inputs
    program.outputs = {n: tensors.get(t, t) for n, t in program.outputs.items()}
    program.ancestors = [
        replace(a, tensors=_composed(a.tensors, tensors)) for a in program.ancestors
    ]


def forget_shapes_behind(program: ModelProgram, tensors: Iterable[str]) -> None:
    """Drop the shapes recorded behind some tensors, in place."""
    starts = {node_name(t) for t in tensors}
    nodes = program.graph_def.node
    readers = [n.name for n in nodes if any(node_name(t) in starts for t in n.input)]
    behind = nodes_ahead(program.graph_def, readers)
    for node in nodes:
        if node.name in behind:
            node.attr.pop("_output_shapes", None)


def rename_nodes(
    program: ModelProgram,
    names: Mapping[str, str],
    counts: Mapping[str, int] | None = None,
) -> None:
    """Rename nodes and all that refers to them, in place."""

    def renamed(text: str) -> str:
        name = node_name(text)
        new = names.get(name)
        if new is None:
            return text
        start = "^" if text.startswith("^") else ""
        return f"{start}{new}{text.removeprefix(start)[len(name) :]}"

    _rename(program, names, renamed)
    # An input layer is known by its placeholder.
    program.layers = tuple(call.renamed(renamed) for call in program.layers)
    tensors = {
        f"{old}:{i}": f"{new}:{i}"
        for old, new in names.items()
        for i in range((counts or {}).get(old, 1))
    }
    program.ancestors = [
        replace(a, tensors=_composed(a.tensors, tensors)) for a in program.ancestors
    ]


def prefix_nodes(program: ModelProgram, prefix: str) -> None:
    """Put a prefix before the names of all nodes and loops' frames, in place."""

    def renamed(text: str) -> str:
        return f"^{prefix}{text[1:]}" if text.startswith("^") else f"{prefix}{text}"

    names = {node.name: f"{prefix}{node.name}" for node in program.graph_def.node}
    for node in program.graph_def.node:
        # In one graph, two loops with frames of one name would be one.
        if "frame_name" in node.attr:
            node.attr["frame_name"].s = prefix.encode() + node.attr["frame_name"].s
    _rename(program, names, renamed)
    program.layers = tuple(call.renamed(renamed) for call in program.layers)
    program.ancestors = [
        replace(
            a,
            prefix=f"{prefix}{a.prefix}",
            tensors={old: f"{prefix}{new}" for old, new in a.tensors.items()},
        )
        for a in program.ancestors
    ]


def _rename(
    program: ModelProgram, names: Mapping[str, str], renamed: Callable[[str], str]
) -> None:
    for node in program.graph_def.node:
        node.name = names.get(node.name, node.name)
        inputs = [renamed(text) for text in node.input]
        if inputs != list(node.input):
            node.input[:] = inputs
        if "_class" in node.attr:
            _rename_groups(node.attr["_class"].list.s, names)
    program.inputs = {n: renamed(t) for n, t in program.inputs.items()}
    program.outputs = {n: renamed(t) for n, t in program.outputs.items()}
    program.captures = {renamed(t): e for t, e in program.captures.items()}
    program.side_effects = [renamed(name) for name in program.side_effects]


def _rename_groups(groups: Any, names: Mapping[str, str]) -> None:
    for i, group in enumerate(groups):
        name = group.removeprefix(b"loc:@").decode(errors="replace")
        if name in names:
            groups[i] = b"loc:@" + names[name].encode()


def _composed(first: Mapping[str, str], then: Mapping[str, str]) -> dict[str, str]:
    return {**then, **{old: then.get(new, new) for old, new in first.items()}}


RESTORE = Words("read a checkpoint with model.restore(path) or assign values")
_NO_ORIGINS: Mapping[str, NodeOrigin] = MappingProxyType({})


@dataclass(frozen=True)
class _Closure:
    """A node of a program whose op has a gradient that exists in Python only."""

    node: Any
    gradient: str
    op: Operation  # The op that it was made from.
    # Gives the name in the program of a tensor near that op.
    rename: Callable[[str], str]

    def read(self) -> Iterator[tuple[Tensor, str]]:
        """Yield the tensors that the gradient reads there, with their program names."""
        for t in op_copies.read_by_gradient(self.op):
            # Edits of a program let the node read other tensors than the op does.
            slots = (i for i, read in enumerate(self.op.inputs) if read is t)
            slot = next(slots, None)
            named = self.rename(t.name) if slot is None else self.node.input[slot]
            yield t, tensor_name(named)


def carry_closures(
    graph: Graph,
    nodes: Iterable[Any],
    ancestors: Iterable[Ancestor],
    origins: Mapping[str, NodeOrigin],
) -> None:
    """Give ops the gradients that `tf.custom_gradient` made for others, traced."""
    reads = state.slot(graph, op_copies.GradientReads)
    for made in _closures(nodes, ancestors, origins):
        named = [(t, _tensor(graph, name)) for t, name in made.read()]
        copies = IdentityMap((t, t_) for t, t_ in named if t_ is not None)
        carried = op_copies.carried_gradient(
            made.op, made.gradient, graph, copies, transformer.copy_replacing
        )
        op_ = graph.get_operation_by_name(made.node.name)
        gradient_functions.set_gradient(op_, carried)
        reads[carried] = list(copies.values())


def prune(
    program: ModelProgram, origins: Mapping[str, NodeOrigin] = _NO_ORIGINS
) -> list[str]:
    """Drop the nodes of a program that neither ends need nor gradients of those."""
    # Linear once for each gradient that reads what only another gradient reads.
    read: dict[str, None] = {}
    node_by_name = nodes_by_name(program.graph_def)
    while True:
        nodes = program.needed(read)
        names = {node.name for node in nodes}
        closures = _closures(nodes, program.ancestors, origins)
        read_names = [
            node_name(name) for closure in closures for _, name in closure.read()
        ]
        new = [
            name for name in read_names if name in node_by_name and name not in names
        ]
        if not new:
            program.keep(nodes)
            return read_names
        read.update(dict.fromkeys(new))


def _closures(
    nodes: Iterable[Any],
    ancestors: Iterable[Ancestor],
    origins: Mapping[str, NodeOrigin],
) -> Iterator[_Closure]:
    ancestors = list(ancestors)
    for node in nodes:
        # Of an op, TensorFlow tells what attributes it has by raising.
        if gradient_functions.ATTRIBUTE not in node.attr:
            continue
        gradient = node.attr[gradient_functions.ATTRIBUTE].s.decode()
        if not gradient_functions.is_closure(gradient):
            continue
        for ancestor in ancestors:
            origin = _origin(ancestor, node.name, origins.get(node.name))
            if origin and gradient_functions.gradient_of(origin[0]) == gradient:
                yield _Closure(node, gradient, *origin)
                break


def _origin(
    ancestor: Ancestor, name: str, origin: NodeOrigin | None
) -> tuple[Operation, Callable[[str], str]] | None:
    """Return the op that a node was made from, and the names of tensors near it."""
    if origin is not None:
        body = functions.body_graph(ancestor.graph, origin.function)
        if body is None:
            return None
        op = _op(body, origin.node)
        return None if op is None else (op, _renaming(body, origin))
    if not name.startswith(ancestor.prefix):
        return None
    op = _op(ancestor.graph, name.removeprefix(ancestor.prefix))
    return None if op is None else (op, ancestor.tensor)


def _renaming(body: Graph, origin: NodeOrigin) -> Callable[[str], str]:
    """Return a function that finds the present names of a FuncGraph's tensors."""
    # The FuncGraph calls its arguments otherwise than the function's definition does.
    names = (t.name for t in body.inputs)
    arguments = dict(zip(names, origin.arguments, strict=True))
    return lambda name: arguments.get(name) or origin.tensor(name)


def _op(graph: Graph, name: str) -> Operation | None:
    try:
        op: Operation = graph.get_operation_by_name(name)
    except (KeyError, ValueError):
        return None
    return op


def _tensor(graph: Graph, name: str) -> Tensor | None:
    try:
        tensor: Tensor = graph.get_tensor_by_name(name)
    except (KeyError, ValueError):
        return None
    return tensor


@dataclass
class SharedState:
    """The objects that a model holds besides its graphs."""

    # The variables by name; of those of a strategy, the first copies.
    variables: dict[str, tf.Variable] = field(default_factory=dict)
    # The objects that own tables and the like, to be saved along.
    resources: list[Any] = field(default_factory=list)
    # The files that tables are read from.
    assets: list[tf.saved_model.Asset] = field(default_factory=list)
    # The variables of strategies by the ids of first copies, which alone do not keep
    # the others.
    wholes: dict[int, Any] = field(default_factory=dict)

    def add_variables(
        self, variables: Iterable[tf.Variable], names: Iterable[str] = ()
    ) -> None:
        """Hold more variables, under given or their own names where these are free."""
        variable_ids = {id(v) for v in self.variables.values()}
        for given, preferred_name in itertools.zip_longest(variables, names):
            variable = replicas.first_copy(given)
            self.wholes[id(variable)] = replicas.whole(variable)
            if id(variable) not in variable_ids:
                variable_ids.add(id(variable))
                name = preferred_name or node_name(variable.name)
                self.variables[fresh_name(self.variables, name)] = variable

    def merged(self, other: SharedState) -> SharedState:
        """Return the holdings of both; variables of the same name are numbered."""
        both = SharedState(
            dict(self.variables),
            _unique([*self.resources, *other.resources]),
            _unique([*self.assets, *other.assets]),
            {**self.wholes, **other.wholes},
        )
        both.add_variables(other.variables.values())
        return both

    def by_handle(self) -> dict[int, tf.Variable]:
        """Return the variables by the identity of their handles."""
        return {id(v.handle): v for v in self.variables.values()}


def holdings_of(root: Any) -> SharedState:
    """Return the resources of a trackable object and its parts."""
    holdings = SharedState()
    variables = []
    for obj in tf.train.TrackableView(root).descendants():
        if isinstance(obj, tf.Variable):
            variables.append(obj)
        elif isinstance(obj, tf.saved_model.Asset):
            holdings.assets.append(obj)
        elif hasattr(obj, "resource_handle"):
            holdings.resources.append(obj)
    holdings.add_variables(variables)
    return holdings


def _unique(objects: Iterable[Any]) -> list[Any]:
    return list({id(o): o for o in objects}.values())


def check_initialized(
    holdings: SharedState, variables: Iterable[tf.Variable], error: Exception
) -> None:
    """Raise, in place of an error of TensorFlow, if variables have no values."""
    names = {id(v): name for name, v in holdings.variables.items()}
    empty = [names.get(id(v), v.name) for v in variables if not v.is_initialized()]
    if empty:
        more = " and more" if len(empty) > 10 else ""
        raise ModelError(
            f"the variables {empty[:10]}{more} have no value: the graph was not frozen",
            remedy=RESTORE,
        ) from error


def check_copies(function: Any) -> None:
    """Refuse a function whose variables the replicas of a strategy would not share."""
    if not replicas.needs_copies():
        return
    kind = type(tf.distribute.get_strategy()).__name__
    for variable in function.variables:
        if replicas.whole(variable) is variable:
            raise ModelError(
                f"the replicas of the {kind} in scope would share variable "
                f"'{variable.name}', which has no copies; open the model, or build its "
                "Keras model, within strategy.scope()"
            )
    for op, variable in replicas.moved_by(function):
        raise ModelError(
            f"'{op.name}' ({op.type}) moves '{variable.name}' by what a replica of the "
            f"{kind} in scope sees, so that its copies would differ; to learn ranges "
            "or statistics, quantize and fold in the function that strategy.run calls"
        )


def restore(holdings: SharedState, checkpoint: str) -> list[str]:
    """Assign the values of a checkpoint by name; see `Model.restore`."""
    try:
        reader = tf.train.load_checkpoint(checkpoint)
        shapes = reader.get_variable_to_shape_map()
        dtypes = reader.get_variable_to_dtype_map()
    except (ValueError, RuntimeError, tf.errors.OpError) as error:
        raise ModelError(f"'{checkpoint}' is no checkpoint: {error}") from error
    variable_by_name = {n: v for n, v in holdings.variables.items() if n in shapes}
    if not variable_by_name:
        raise ModelError(
            f"checkpoint '{checkpoint}' has none of {list(holdings.variables)[:10]}; "
            f"it has {sorted(shapes)[:10]}"
        )
    # All variables are checked before the first is assigned.
    for name, variable in variable_by_name.items():
        if not variable.shape.is_compatible_with(shapes[name]) or (
            variable.dtype != dtypes[name]
        ):
            raise ModelError(
                f"variable '{name}' is {variable.dtype.name} of shape "
                f"{variable.shape}; the checkpoint has {dtypes[name].name} of shape "
                f"{shapes[name]}"
            )
    for name, variable in variable_by_name.items():
        # Within a strategy, all copies of a variable have to get the value.
        replicas.whole(variable).assign(reader.get_tensor(name))
    return [name for name in holdings.variables if name not in variable_by_name]
