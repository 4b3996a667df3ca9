"""Shapes that follow through loops: elements of lists, variables behind handles.

TensorFlow infers shapes op by op as a graph is made, and stops where a handle leads
elsewhere: at an element that is taken from a list, a variable that is read in the body
of a function, the result of a loop. Handles are followed here, into the bodies of
functions and out of them again, and TensorFlow infers the rest from their contents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import tensorflow as tf

from geutil.graph import creation, function_calls, op_types
from geutil.graph.function_calls import Caller
from geutil.graph.resource_variables import shape_behind
from geutil.graph.state import slot
from geutil.graph.types import (
    Graph,
    MutableIdentityMap,
    Operation,
    Tensor,
    is_func_graph,
)
from geutil.graph.walks import data_inputs


@dataclass(frozen=True)
class Content:
    """The object behind a handle: a variable, or each element of a list."""

    shape: tf.TensorShape
    # Its value, where that is the same each time: the shape of a tensor that was kept
    # for a gradient.
    value: tuple[int, ...] | None = None
    is_empty: bool = False  # Whether it is a list without elements.


Behind: TypeAlias = Content | None
"""The content behind a handle, None where it is not known."""
_Facts: TypeAlias = MutableIdentityMap[Content]


class _Contents:
    """The contents behind the handles of a refined graph."""

    def __init__(self) -> None:
        self.of_handles: _Facts = MutableIdentityMap()


_HANDLES = (tf.resource, tf.variant)
_SAME = frozenset(("Identity", "IdentityN", "StopGradient", "ZerosLike", "AddN"))
"""Ops whose result leads to contents as large as those behind their input."""
_OTHER_VALUES = frozenset(("AddN", "ZerosLike"))
"""Those of them that compute other values."""
_TAKEN = {"TensorListGetItem": 0, "TensorListPopBack": 1, "ReadVariableOp": 0}
"""Ops that yield the content behind their first input, and the output that does."""
_MADE = frozenset(("EmptyTensorList", "TensorListReserve"))
"""Ops that make a list of elements of the shape that is their first input."""
_SHAPE_BEHIND = frozenset(("TensorListElementShape", "VariableShape"))
"""Ops that yield the shape of the content behind their first input."""
_STOPS = frozenset((*_TAKEN, *_SHAPE_BEHIND, "ResourceGather", "TensorListStack"))
"""Ops, besides those that call functions, at which TensorFlow stops."""
_CALLERS = op_types.LOOPS | op_types.CALLS | op_types.BRANCHINGS
_LONGEST = 16
"""Elements of the longest vector that is kept as a shape; longer ones are data."""
_DEEPEST = 32
"""How many functions deep shapes are followed."""


def inferred_graph(graph_def: Any) -> Graph:
    """Return a graph of nodes, with the shapes that follow, through loops as well."""
    # The nodes lose their colocation: it may name ops that are not among them.
    for node in graph_def.node:
        node.attr.pop("_class", None)
    graph = creation.new_graph()
    creation.import_ops(graph, graph_def, {})
    refine(graph)
    return graph


def refine(graph: Graph, passed: Sequence[Behind] = ()) -> None:
    """Set the static shapes of a graph that follow through its loops."""
    # The objects behind its handles (`passed`: behind its arguments) are noted in a
    # slot of the graph, so that the bodies of its functions can be refined, too. A
    # graph without lists, whose calls and loops have known shapes, stays as it is; so
    # does one with loops of version 1.
    _Refiner().refine(graph, passed)


def behind(handles: Sequence[Tensor]) -> list[Behind]:
    """Return the contents behind the handles of a refined graph."""
    known = (slot(t.graph, _Contents).of_handles.get(t) for t in handles)
    # A graph that needed no refining has no notes, but its variables are known.
    return [f or _variable(t) for f, t in zip(known, handles, strict=True)]


def _variable(handle: Tensor) -> Behind:
    """Return the variable that a handle leads to, as TensorFlow knows it."""
    shape = shape_behind(handle) if handle.dtype == tf.resource else None
    return Content(shape) if shape is not None and shape.is_fully_defined() else None


@dataclass(frozen=True)
class _Results:
    """Known facts of the results of an op that runs functions."""

    shapes: Sequence[tf.TensorShape | None] = ()
    behind: Sequence[Behind] = ()  # Of each result the content behind it.


_UNKNOWN = _Results()


class _Refiner:
    """Refines a graph and its callees, each function once for each set of arguments."""

    def __init__(self) -> None:
        self._results: dict[tuple[str, ...], _Results | None] = {}
        self._depth = 0

    def refine(self, graph: Graph, passed: Sequence[Behind]) -> None:
        """Refine a graph that a call passes handles of known content."""
        if not _leads_elsewhere(graph):
            return
        facts: _Facts = MutableIdentityMap()
        for place, argument in enumerate(getattr(graph, "inputs", ())):
            content = passed[place] if place < len(passed) else None
            content = content or _variable(argument)
            if content is not None:
                facts[argument] = content
        self._infer(graph, facts)
        slot(graph, _Contents).of_handles = facts

    def _infer(self, graph: Graph, facts: _Facts) -> None:
        """Import a copy of a graph part by part, and take over its shapes."""
        # The facts of one part are set before the next one is made, whose shapes
        # TensorFlow infers from it.
        scratch = creation.new_graph()
        callers = {caller.op: caller for caller in function_calls.callers_in(graph)}
        library = graph.as_graph_def().library
        copies: MutableIdentityMap[Tensor] = MutableIdentityMap()
        for part in _parts(graph):
            graph_def = creation.graph_def_of(graph, part)
            graph_def.library.CopyFrom(library)
            library = type(library)()
            members = frozenset(part)
            for node in graph_def.node:
                # Control inputs do not matter for shapes.
                data = data_inputs(node.input)
                del node.input[:]
                node.input.extend(data)
                node.attr.pop("_class", None)
            read = (t for op in part for t in op.inputs if t.op not in members)
            fed = {t.name: copies[t] for t in read}
            # By place: a name can be the scope of ops of parts before, and changes.
            made = creation.import_ops(scratch, graph_def, fed)
            for op, copy in zip(part, made, strict=True):
                for t, t_ in zip(op.outputs, copy.outputs, strict=True):
                    copies[t] = t_
                    _set_shape(t_, t.shape)
                self._tell(op, copy, facts, callers.get(op))
                for t, value in _values(op, [facts.get(t) for t in op.inputs]):
                    with scratch.as_default():
                        copies[t] = tf.constant(value, t.dtype)
        for t, t_ in copies.items():
            _set_shape(t, t_.shape)

    def _tell(
        self, op: Operation, copy: Operation, facts: _Facts, caller: Caller | None
    ) -> None:
        """Set the shapes of an op's results, and note the contents behind them."""
        inner = [facts.get(t) for t in op.inputs]
        if caller is None:
            shapes, contents = _shapes(copy, inner), _behind(copy, inner)
        else:
            results = self._called(caller, copy, inner)
            shapes, contents = results.shapes, results.behind
        for t, shape in zip(copy.outputs, shapes, strict=False):
            if shape is not None:
                _set_shape(t, shape)
        for t, content in zip(op.outputs, contents, strict=False):
            if content is not None and t.dtype in _HANDLES:
                facts[t] = content

    def _called(
        self, caller: Caller, copy: Operation, inner: Sequence[Behind]
    ) -> _Results:
        """Return the known facts of the results of an op that calls functions."""
        arguments = copy.inputs[caller.first_argument :]
        passed = list(inner[caller.first_argument :])
        if caller.is_loop:
            return self._looped(caller, arguments, passed)
        if not (caller.is_call or caller.is_branching):
            return _UNKNOWN
        graph = caller.op.graph
        found = [self._body(graph, name, arguments, passed) for name in caller.names]
        return _common([results for results in found if results is not None])

    def _looped(
        self, caller: Caller, arguments: Sequence[Tensor], passed: list[Behind]
    ) -> _Results:
        """Return the facts of a loop's results that no iteration changes."""
        (name,) = (f.name for f in caller.callees if f.attribute == "body")
        body = _UNKNOWN
        # The elements of a list that is empty at first are known after one iteration.
        for _ in range(3):
            found = self._body(caller.op.graph, name, arguments, passed)
            if found is None:
                return _UNKNOWN
            body = found
            before, pairs = passed, zip(passed, body.behind, strict=True)
            passed = [_joined(content, after) for content, after in pairs]
            if before == passed:
                break
        ends = zip(arguments, body.shapes, strict=True)
        shapes = [t.shape if _same(t.shape, shape) else None for t, shape in ends]
        return _Results(shapes, passed)

    def _body(
        self,
        graph: Graph,
        name: str,
        arguments: Sequence[Tensor],
        passed: Sequence[Behind],
    ) -> _Results | None:
        """Return the known facts of the results of a function, or None."""
        key = (name, *(str(t.shape) for t in arguments), *map(str, passed))
        if key not in self._results and self._depth < _DEEPEST:
            # Nothing, for a function that calls itself.
            self._results[key] = None
            body = function_calls.body_for_call(graph, name, arguments)
            if body is not None:
                self._depth += 1
                self.refine(body, passed)
                self._depth -= 1
                shapes = [t.shape for t in body.outputs]
                self._results[key] = _Results(shapes, behind(body.outputs))
        return self._results.get(key)


def _may_call(op: Operation) -> bool:
    return op.type in _CALLERS or op.graph._is_function(op.type)


def _leads_elsewhere(graph: Graph) -> bool:
    """Return whether shapes in a graph may follow from the contents behind handles."""
    ops = graph.get_operations()
    tensors = [t for op in ops for t in op.outputs]
    if any(op.type in op_types.ENTERS for op in ops):
        return False
    if any(t.dtype == tf.variant for t in tensors):
        return True
    reads = is_func_graph(graph) and any(t.dtype == tf.resource for t in tensors)
    calls = any(_may_call(op) and any(map(_is_open, op.outputs)) for op in ops)
    return calls or (reads and any(map(_is_open, tensors)))


def _parts(graph: Graph) -> list[list[Operation]]:
    """Return the ops in parts, each of which needs facts of earlier parts only."""
    depth: dict[Operation, int] = {}
    parts: list[list[Operation]] = []
    for op in graph.get_operations():
        place = 0
        for t in op.inputs:
            stops = t.op.type in _STOPS or (_may_call(t.op) and _is_open(t))
            place = max(place, depth[t.op] + stops)
        depth[op] = place
        parts += [[] for _ in range(place + 1 - len(parts))]
        parts[place].append(op)
    return parts


def _is_open(tensor: Tensor) -> bool:
    return tensor.dtype not in _HANDLES and not tensor.shape.is_fully_defined()


def _shapes(op: Operation, inner: Sequence[Behind]) -> Sequence[tf.TensorShape | None]:
    """Return the shapes of an op's results that follow from contents behind handles."""
    content = inner[0] if inner else None
    if content is None:
        return ()
    if op.type in _TAKEN:
        return [*[None] * _TAKEN[op.type], content.shape]
    if op.type == "TensorListStack":
        count = op.get_attr("num_elements")
        rows = tf.TensorShape([None if count < 0 else count])
        return [rows.concatenate(content.shape)]
    if op.type == "ResourceGather" and not op.get_attr("batch_dims"):
        return [op.inputs[1].shape.concatenate(content.shape[1:])]
    return ()


def _values(
    op: Operation, inner: Sequence[Behind]
) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Yield the results of an op that are shapes which are known, and their values."""
    content = inner[0] if inner else None
    if content is None:
        return
    if op.type in _SHAPE_BEHIND and content.shape.is_fully_defined():
        yield op.outputs[0], tuple(content.shape.as_list())
    elif op.type in _TAKEN and content.value is not None:
        yield op.outputs[_TAKEN[op.type]], content.value


def _behind(op: Operation, inner: Sequence[Behind]) -> Sequence[Behind]:
    """Return the contents behind the results of an op that are handles."""
    content = inner[0] if inner else None
    if op.type == "VarHandleOp":
        return [Content(tf.TensorShape(op.get_attr("shape")))]
    if op.type == "TensorListFromTensor":
        shape = op.inputs[0].shape
        return [Content(shape[1:]) if shape.rank else None]
    if op.type in _MADE:
        dims = tf.get_static_value(op.inputs[0])
        is_told = dims is not None and dims.ndim == 1 and (dims >= 0).all()
        return [Content(tf.TensorShape(dims if is_told else None), is_empty=True)]
    if op.type in op_types.LIST_ELEMENTS:
        added = op.inputs[op_types.LIST_ELEMENTS[op.type]]
        # Who sets some of the elements leaves others as they are.
        is_pushed = op.type == "TensorListPushBack"
        value = _shape_in(added) if is_pushed else None
        return [_joined(content, Content(added.shape, value))]
    if op.type == "IdentityN":
        return inner
    if op.type in _SAME or op.type == "TensorListPopBack":
        first = _first(inner)
        if first is not None and op.type in _OTHER_VALUES:
            first = replace(first, value=None)
        return [first]
    return ()


def _joined(content: Behind, added: Behind) -> Behind:
    """Return the content of a list that gained elements."""
    if content is None or added is None or content == added:
        return content and added
    if content.is_empty:
        is_told = content.shape.is_fully_defined() or added.is_empty
        return replace(added, shape=content.shape) if is_told else added
    # Elements may differ where a list leaves their shape open.
    same = _same(content.shape, added.shape)
    value = content.value if content.value == added.value else None
    return Content(content.shape if same else tf.TensorShape(None), value)


def _shape_in(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the shape that a tensor holds, None if it holds none that is known."""
    if not tensor.dtype.is_integer or tensor.shape.rank != 1:
        return None
    value = tf.get_static_value(tensor)
    return None if value is None or value.size > _LONGEST else tuple(map(int, value))


def _common(found: Sequence[_Results]) -> _Results:
    """Return the facts in common of the results of functions, one of which runs."""
    if not found:
        return _UNKNOWN
    first = found[0]
    shapes = [
        shape if all(_same(shape, f.shapes[i]) for f in found) else None
        for i, shape in enumerate(first.shapes)
    ]
    places = range(len(shapes))
    all_behind = ([f.behind[i] for f in found] for i in places)
    return _Results(shapes, [_first(known) for known in all_behind])


def _first(contents: Iterable[Behind]) -> Behind:
    return next((content for content in contents if content is not None), None)


def _same(first: tf.TensorShape | None, second: tf.TensorShape | None) -> bool:
    if first is None or second is None or not second.is_fully_defined():
        return False
    return first.is_fully_defined() and first.as_list() == second.as_list()


def _set_shape(tensor: Tensor, shape: tf.TensorShape) -> None:
    """Set a shape, unless it is one already, or cannot be this one."""
    if _is_open(tensor) and tensor.shape.is_compatible_with(shape):
        tensor.set_shape(shape)
