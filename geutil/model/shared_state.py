"""State that the graphs of a model share: variables, tables, assets, closures.

`tf.custom_gradient` leaves its gradient as a closure over tensors of the graph that it
was called in; a graph made from protobufs knows the closure's name alone. Here the ops
of such a graph get gradients that read their own graph's tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from geutil.bodies.inlining import NodeOrigin
from geutil.errors import ModelError, Words
from geutil.graph import functions, gradient_functions, replicas, state
from geutil.graph.types import Graph, IdentityMap, Operation, Tensor
from geutil.graph.walks import node_name, tensor_name
from geutil.model import programs
from geutil.model.programs import Ancestor, ModelProgram
from geutil.transform import op_copying, transformer

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
        for t in op_copying.read_by_gradient(self.op):
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
    reads = state.slot(graph, op_copying.GradientReads)
    for closure in _closures(nodes, ancestors, origins):
        named = [(t, _tensor(graph, name)) for t, name in closure.read()]
        copies = IdentityMap((t, t_) for t, t_ in named if t_ is not None)
        carried = op_copying.carried_gradient(
            closure.op, closure.gradient, graph, copies, transformer.copy_replacing
        )
        op_ = graph.get_operation_by_name(closure.node.name)
        gradient_functions.set_gradient(op_, carried)
        reads[carried] = list(copies.values())


def prune(
    program: ModelProgram, origins: Mapping[str, NodeOrigin] = _NO_ORIGINS
) -> list[str]:
    """Drop the nodes of a program that neither ends need nor gradients of those."""
    # Linear once for each gradient that reads what only another gradient reads.
    read: dict[str, None] = {}
    node_by_name = programs.nodes_by_name(program.graph_def)
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
                self.variables[programs.fresh_name(self.variables, name)] = variable

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
