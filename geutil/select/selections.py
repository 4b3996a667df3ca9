"""Selections of callers: lists of ops and tensors, layers and scopes by name.

A name means, in this order, a tensor (`conv/Relu:0`), an op, a Keras layer (by its
path, `block/conv`, or by its own name, `conv`), or a name scope. Where it fits several
of one kind, it is refused, and the candidates are listed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import tensorflow as tf

from geutil.errors import ArgumentTypeError, SelectionError
from geutil.graph import adjacency, keras_calls, replicas, types
from geutil.graph.keras_calls import LayerCall
from geutil.graph.types import Element, Graph, IdentitySet, Operation, Tensor, type_name


class ListView(Sequence[Any]):
    """A read-only view of a list whose elements are compared by identity."""

    # `x in view` and `view.index(x)` are safe for tensors of a FuncGraph, for which
    # `==` would add an op to the graph.

    def __init__(self, elements: list[Any]) -> None:
        self._elements = elements

    def __getitem__(self, index: Any) -> Any:
        return self._elements[index]

    def __len__(self) -> int:
        return len(self._elements)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._elements)

    def __contains__(self, element: object) -> bool:
        return any(e is element for e in self._elements)

    def index(self, element: Any, start: int = 0, stop: int | None = None) -> int:
        """Return the first position of `element` between `start` and `stop`."""
        for position in range(*slice(start, stop).indices(len(self._elements))):
            if self._elements[position] is element:
                return position
        raise ValueError(f"'{getattr(element, 'name', element)}' is not in the list")

    def count(self, element: Any) -> int:
        """Return how many times `element` is there."""
        return sum(e is element for e in self._elements)

    def __add__(self, other: Iterable[Any]) -> list[Any]:
        return [*self._elements, *other]

    def __radd__(self, other: Iterable[Any]) -> list[Any]:
        return [*other, *self._elements]

    def __repr__(self) -> str:
        return repr(self._elements)


def graph_of_all(elements: Iterable[Element]) -> Graph | None:
    """Return the graph that all `elements` belong to, or None when there are none."""
    graph: Graph | None = None
    first: Element = None
    for element in elements:
        if graph is None:
            graph, first = element.graph, element
        elif element.graph is not graph:
            raise SelectionError(
                f"'{element.name}' and '{first.name}' belong to different graphs; copy "
                "one over with geutil.copy(..., dst_graph=...) first"
            )
    return graph


def get_unique_graph(
    tops: Any, check_types: Any = None, none_if_empty: bool = False
) -> Graph | None:
    """Return the graph that some ops and tensors belong to.

    Args:
        tops: an iterable of ops and tensors, or a graph, which is returned.
        check_types: the type of the elements, or several; None for ops and tensors.
        none_if_empty: return None where there are no elements.

    Raises:
        ArgumentTypeError: `tops` is no iterable, or an element is of another type.
        SelectionError: two elements belong to different graphs, or there are none and
            `none_if_empty` is False.

    Cost: linear in the elements.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0)
        >>> ge.util.get_unique_graph([x, x.op]) is graph
        True
    """
    if types.is_graph(tops):
        return tops
    if not is_iterable(tops):
        raise ArgumentTypeError(
            f"expected an iterable of ops and tensors, got {type_name(tops)}"
        )
    if check_types is None:
        check_types = (tf.Operation, tf.Tensor)
    kinds = tuple(check_types) if is_iterable(check_types) else (check_types,)
    listed = list(tops)
    for element in listed:
        if not isinstance(element, kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise ArgumentTypeError(f"expected {names}, got {type_name(element)}")
        # An eager tensor is a tf.Tensor too, but it has no graph.
        if isinstance(element, tf.Tensor):
            types.require_tensor(element)
    graph = graph_of_all(listed)
    if graph is None and not none_if_empty:
        raise SelectionError(
            "there are no ops and tensors, so that no graph is theirs; pass some, or "
            "none_if_empty=True"
        )
    return graph


def make_list_of_op(
    ops: Any,
    check_graph: bool = True,
    allow_graph: bool = True,
    ignore_ts: bool = False,
) -> list[Operation]:
    """Return a new list of the ops in `ops`.

    Args:
        ops: an op, an iterable of ops, or a graph (all of its ops).
        check_graph: whether to refuse ops of different graphs.
        allow_graph: whether to accept a graph.
        ignore_ts: whether to skip tensors instead of refusing them.

    Raises:
        ArgumentTypeError: `ops` holds something else.
        SelectionError: the ops belong to different graphs.

    Cost: linear in the ops.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0, name="x")
        >>> [op.name for op in ge.make_list_of_op(graph)]
        ['x']
    """
    return _make_list(
        ops,
        types.is_op,
        types.is_tensor if ignore_ts else None,
        check_graph,
        allow_graph,
    )


def make_list_of_t(
    ts: Any,
    check_graph: bool = True,
    allow_graph: bool = True,
    ignore_ops: bool = False,
) -> list[Tensor]:
    """Return a new list of the tensors in `ts`.

    Args:
        ts: a tensor, an iterable of tensors, or a graph (all of its tensors).
        check_graph: whether to refuse tensors of different graphs.
        allow_graph: whether to accept a graph.
        ignore_ops: whether to skip ops instead of refusing them.

    Raises:
        ArgumentTypeError: `ts` holds something else.
        SelectionError: the tensors belong to different graphs.

    Cost: linear in the tensors.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0, name="x")
        >>> ge.make_list_of_t(x)
        [<tf.Tensor 'x:0' shape=() dtype=float32>]
    """
    return _make_list(
        ts,
        types.is_tensor,
        types.is_op if ignore_ops else None,
        check_graph,
        allow_graph,
    )


def _make_list(
    elements: Any, is_wanted: Any, ignored: Any, check_graph: bool, allow_graph: bool
) -> list[Element]:
    """Return the wanted elements, without ignored ones; refuse all others."""
    what = "tf.Operation" if is_wanted is types.is_op else "tf.Tensor"
    if types.is_graph(elements):
        if not allow_graph:
            raise ArgumentTypeError(
                f"expected {what}s, got a tf.Graph; pass graph.get_operations()"
            )
        return (
            elements.get_operations()
            if is_wanted is types.is_op
            else get_tensors(elements)
        )
    listed = types.as_list(elements)
    for element in listed:
        if not is_wanted(element) and not (ignored and ignored(element)):
            raise ArgumentTypeError(
                f"expected a {what}, got {type_name(element)}"
                f"{types.eager_hint(element)}"
            )
    # Ignored elements have to be of the same graph, too.
    if check_graph:
        graph_of_all(listed)
    return [element for element in listed if is_wanted(element)] if ignored else listed


def get_tensors(graph: Graph) -> list[Tensor]:
    """Return every tensor of `graph`, in graph order.

    Raises:
        ArgumentTypeError: `graph` is not a `tf.Graph`.

    Cost: linear in ops and tensors.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.constant(1.0, name="x")
        >>> ge.get_tensors(graph)
        [<tf.Tensor 'x:0' shape=() dtype=float32>]
    """
    types.require_graph(graph)
    return [t for op in graph.get_operations() for t in op.outputs]


def get_generating_ops(ts: Any) -> list[Operation]:
    """Return the op that computes each tensor of `ts`, with repetitions.

    Raises:
        ArgumentTypeError: `ts` is not made of tensors.

    Cost: linear in the tensors.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     x = tf.constant(1.0, name="x")
        >>> [op.name for op in ge.get_generating_ops([x, x])]
        ['x', 'x']
    """
    return [t.op for t in make_list_of_t(ts, allow_graph=False)]


def get_consuming_ops(ts: Any) -> list[Operation]:
    """Return the ops that read a tensor of `ts`, each once.

    They come tensor by tensor, in graph order for each.

    Raises:
        ArgumentTypeError: `ts` is not made of tensors.

    Cost: linear in the edges that leave the tensors.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     x = tf.constant(1.0, name="x")
        ...     _ = tf.add(x, x, name="y"), tf.negative(x, name="z")
        >>> [op.name for op in ge.get_consuming_ops(x)]
        ['y', 'z']
    """
    consumers: dict[Operation, None] = {}
    for t in make_list_of_t(ts, allow_graph=False):
        consumers.update(dict.fromkeys(adjacency.consumers(t)))
    return list(consumers)


def is_iterable(obj: object) -> bool:
    """Return whether `obj` can be iterated over. A tensor is one thing, and cannot.

    Cost: constant.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.util import is_iterable
        >>> with tf.Graph().as_default():
        ...     x = tf.zeros([2])
        >>> is_iterable([x]), is_iterable(x), is_iterable(x.op)
        (True, False, False)
    """
    if isinstance(obj, tf.Tensor):
        return False
    try:
        iter(obj)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def check_graphs(*views: Any) -> None:
    """Refuse objects with a `graph` of their own that is not the same for all.

    Objects whose graph is None (empty views) agree with any.

    Raises:
        SelectionError: two graphs differ.

    Cost: linear in the objects.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     x = tf.zeros([2])
        >>> ge.util.check_graphs(ge.sgv(), ge.sgv(x.op), x)
    """
    graphs = [view.graph for view in views if view.graph is not None]
    for position, graph in enumerate(graphs):
        if graph is not graphs[0]:
            raise SelectionError(
                f"argument {position} belongs to another graph than argument 0; copy "
                "one over with geutil.copy(..., dst_graph=...) first"
            )


def can_be_regex(obj: object) -> bool:
    """Return whether `obj` is a string or a compiled regular expression.

    Example:
        >>> import geutil as ge
        >>> ge.can_be_regex("^foo/"), ge.can_be_regex(1)
        (True, False)
    """
    return isinstance(obj, str | re.Pattern)


def make_regex(obj: str | re.Pattern[str]) -> re.Pattern[str]:
    """Return `obj` as a compiled regular expression.

    Raises:
        SelectionError: `obj` is neither a string nor a regular expression, or the
            string is not a valid one.

    Example:
        >>> import geutil as ge
        >>> ge.make_regex("^foo/").pattern
        '^foo/'
    """
    if isinstance(obj, re.Pattern):
        return obj
    if not isinstance(obj, str):
        raise SelectionError(f"expected a string or a regex, got {type_name(obj)}")
    try:
        return re.compile(obj)
    except re.error as error:
        raise SelectionError(
            f"'{obj}' is no regular expression ({error}); put a plain name "
            "through re.escape"
        ) from error


Entry = TypeVar("Entry", bound=Any)
# Names that a message lists; the rest is counted.
_MOST_LISTED = 10


@dataclass(frozen=True, eq=False)
class Layer:
    """A call of a Keras layer in a graph. A layer called twice has two records.

    Attributes:
        name: the name of the layer.
        path: the names of the enclosing models and layers and its own, separated by
            slashes: `encoder/conv`. The outermost model is left out.
        class_name: its class, such as "Conv2D"; "" if a file does not record it.
        scope: the name scope of its ops.
        inputs: the tensors that it reads.
        outputs: the tensors that it returns. A layer that does nothing at inference,
            such as Dropout, returns its input.
        ops: its ops, in graph order, including those of layers inside it.
    """

    name: str
    path: str
    class_name: str
    scope: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    ops: tuple[Operation, ...]

    def __repr__(self) -> str:
        kind = self.class_name or "layer"
        return f"<{kind} '{self.path}': {len(self.ops)} ops in '{self.scope}'>"


def layers_of(graph: Graph) -> tuple[Layer, ...]:
    """Return the Keras layers of a graph, in the order in which they are called.

    Layers none of whose ops and results are left are not among them.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.select.selections import layers_of
        >>> layers_of(tf.Graph())
        ()
    """
    return tuple(_layers(graph, keras_calls.calls_in(graph)))


def _layers(graph: Graph, calls: Iterable[LayerCall]) -> Iterator[Layer]:
    """Yield the layers of a graph that belong to calls."""
    calls = list(calls)
    if not calls:
        return
    ops_by_scope = _ops_by_scope(graph, {call.scope for call in calls})
    by_name = {op.name: op for op in graph.get_operations()}
    for call in calls:
        ops = ops_by_scope.get(call.scope, [])
        outputs = _recorded(by_name, call.outputs)
        if outputs is None:
            outputs = _given(ops, call.scope)
        inputs = _recorded(by_name, call.inputs)
        if inputs is None:
            inputs = _read(ops, call.scope)
        # An op that only forwards is here as long as its input is.
        if ops or (outputs and call.outputs == call.inputs):
            names = (call.name, call.path, call.class_name, call.scope)
            yield Layer(*names, inputs, outputs, tuple(ops))


def _ops_by_scope(graph: Graph, scopes: set[str]) -> dict[str, list[Operation]]:
    found: dict[str, list[Operation]] = {}
    for op in graph.get_operations():
        for scope in types.scopes_around(op.name):
            if scope in scopes:
                found.setdefault(scope, []).append(op)
    return found


def _recorded(
    by_name: Mapping[str, Operation], names: tuple[str, ...] | None
) -> tuple[Tensor, ...] | None:
    """Return tensors by name; None if one is not there any more."""
    if names is None:
        return None
    tensors = []
    for name in names:
        op = by_name.get(name.partition(":")[0])
        index = int(name.partition(":")[2] or 0)
        if op is None or index >= len(op.outputs):
            return None
        tensors.append(op.outputs[index])
    return tuple(tensors)


def _given(ops: Iterable[Operation], scope: str) -> tuple[Tensor, ...]:
    """Return the tensors of a scope that ops outside read, or that nothing reads."""
    outputs = []
    for t in (t for op in ops for t in op.outputs if not _is_state(t)):
        readers = t.consumers()
        inside = [types.is_in_scope(op.name, scope) for op in readers]
        if not all(inside) or not readers:
            outputs.append(t)
    read = [t for t in outputs if t.consumers()]
    # Results of an op that nothing uses are none of the layer's.
    return tuple(read or outputs)


def _read(ops: Iterable[Operation], scope: str) -> tuple[Tensor, ...]:
    tensors = (t for op in ops for t in op.inputs if not _is_state(t))
    outside = (t for t in tensors if not types.is_in_scope(t.op.name, scope))
    return tuple(IdentitySet(outside))


def _is_state(tensor: Tensor) -> bool:
    return tensor.dtype in (tf.resource, tf.variant) or types.is_reference(tensor)


def is_name(item: Any) -> bool:
    """Return whether something is a name, a layer, or a tensor of a Keras model."""
    return isinstance(item, str | Layer) or is_keras(item)


def tensor_of(
    graph: Graph, item: Any, what: str = "the graph", others: Iterable[str] = ()
) -> Tensor:
    """Return the one tensor that is selected.

    Args:
        graph: the graph.
        item: a tensor, an op or layer with one result, a tensor of a functional Keras
            model (`layer.output`), or a name of any of them, or of a scope.
        what: the graph in words, for messages.
        others: names that the caller has looked up already, for messages.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.select.selections import tensor_of
        >>> with tf.Graph().as_default() as graph:
        ...     x = tf.zeros([2], name="x")
        ...     y = tf.nn.relu(tf.negative(x, name="block/minus"), name="block/relu")
        >>> tensor_of(graph, "block").name
        'block/relu:0'
    """
    if types.is_tensor(item):
        tensors = [item]
    elif types.is_op(item) or isinstance(item, Layer):
        tensors = list(item.outputs)
    elif isinstance(item, str):
        others = list(others)
        named = _tensors_named(graph, item)
        if named is None:
            ends = "input, output, " if others else ""
            raise SelectionError(
                f"{what} has no {ends}tensor, op, layer or scope '{item}'; "
                f"{similar(graph, item, others)}"
            )
        tensors = named
    else:
        tensors = _tensors_of_keras(graph, item, what)
    if len(tensors) != 1:
        raise SelectionError(_not_one(item, tensors))
    if tensors[0].graph is not graph:
        raise SelectionError(f"'{tensors[0].name}' is in another graph than {what}")
    return tensors[0]


@contextmanager
def outputs_meant(graph_or_model: Any, outputs: Any) -> Iterator[None]:
    """Restrict clients to the ancestors of some outputs, in a block."""
    # Outputs are as `tensor_of` takes them; none mean all of the graph.
    if is_name(outputs):
        outputs = [outputs]
    meant = types.as_list(outputs)
    if not meant:
        yield
        return
    if not types.is_graph(graph_or_model):
        raise ArgumentTypeError(
            "outputs= is for graphs, where other networks may be; cut a model by "
            "model.cut(outputs=...)"
        )
    tensors = [tensor_of(graph_or_model, item) for item in meant]
    with replicas.only_behind(graph_or_model, tensors):
        yield


def _not_one(item: Any, tensors: list[Tensor]) -> str:
    kind = "op" if types.is_op(item) else ""
    name = item if isinstance(item, str) else getattr(item, "name", item)
    listed = _listed([t.name for t in tensors])
    if kind and tensors:
        return (
            f"op '{name}' has {len(tensors)} outputs; pass a tensor such as "
            f"'{tensors[0].name}'"
        )
    if not tensors:
        return f"'{name}' gives no tensor; name what computes one"
    return f"'{name}' fits {len(tensors)} tensors; pass one of {listed}"


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_LISTED
    return f"{names[:_MOST_LISTED]}" + (f" and {more} more" if more > 0 else "")


def _tensors_named(graph: Graph, name: str) -> list[Tensor] | None:
    """Return the tensors that a name means; None if nothing has it."""
    try:
        element = graph.as_graph_element(name)
    except (KeyError, ValueError):
        element = None
    if types.is_tensor(element):
        return [element]
    if types.is_op(element):
        # The reader of an output bears its name, and is nothing else.
        if any(t.op is element for t in getattr(graph, "outputs", ())):
            return [element.inputs[0]]
        if len(element.outputs) != 1:
            raise SelectionError(_not_one(element, list(element.outputs)))
        return list(element.outputs)
    layers = layers_named(graph, name)
    if layers:
        return list(IdentitySet(t for layer in layers for t in layer.outputs))
    scope = name.rstrip("/")
    ops = [op for op in graph.get_operations() if types.is_in_scope(op.name, scope)]
    return list(_given(ops, scope)) if ops and scope else None


def layers_named(graph: Graph, name: str) -> tuple[Layer, ...]:
    """Return the calls of the one layer of a name or path; none if there is none."""
    calls = keras_calls.calls_in(graph)
    path = name.rstrip("/")
    fitting = [call for call in calls if call.path == path]
    # A layer of exactly this path is meant, whatever others end in it.
    if not fitting:
        fitting = [call for call in calls if f"/{call.path}".endswith(f"/{path}")]
    layers = tuple(_layers(graph, fitting))
    paths = list(dict.fromkeys(layer.path for layer in layers))
    if len(paths) > 1:
        raise SelectionError(
            f"{len(paths)} layers are called '{name}'; pass one of {_listed(paths)}"
        )
    return layers


def is_keras(item: Any) -> bool:
    """Return whether something is a layer of Keras, or a tensor of its models."""
    return keras_calls.node_behind(item) is not None or keras_calls.is_layer(item)


def layers_of_keras(graph: Graph, item: Any, what: str = "the graph") -> list[Layer]:
    """Return the calls of a Keras layer, or the one that gave a tensor of a model."""
    behind = keras_calls.node_behind(item)
    layer = item if behind is None else behind[0]
    calls = keras_calls.calls_in(graph)
    own = [call for call in calls if call.layer is not None and call.layer() is layer]
    if not own:
        # Loaded anew, or opened from a file, it is another object.
        kind = type(layer).__name__
        known = [c for c in calls if c.class_name in (kind, "")]
        own = [c for c in known if f"/{c.path}".endswith(f"/{layer.name}")]
        if len({call.path for call in own}) > 1:
            raise SelectionError(
                f"several layers of {what} are called '{layer.name}'; pass one of "
                f"{_listed(list(dict.fromkeys(call.path for call in own)))}"
            )
    if behind is not None and len(own) > 1:
        own = [call for call in own if call.node == behind[1]]
    found = list(_layers(graph, own))
    if not found:
        raise SelectionError(
            f"{what} was not made from the Keras layer '{layer.name}', or has lost it; "
            f"{similar(graph, layer.name)}"
        )
    return found


def _tensors_of_keras(graph: Graph, item: Any, what: str) -> list[Tensor]:
    if not is_keras(item):
        raise SelectionError(
            f"expected a tensor, an op, a Keras layer or a name, got {type_name(item)}"
        )
    layers = layers_of_keras(graph, item, what)
    behind = keras_calls.node_behind(item)
    # A symbolic tensor stands for one result of its layer.
    if behind is not None and all(len(la.outputs) > behind[2] for la in layers):
        return list(IdentitySet(layer.outputs[behind[2]] for layer in layers))
    return list(IdentitySet(t for layer in layers for t in layer.outputs))


def label(graph: Graph, item: Any) -> str:
    """Return a label for the tensor of a layer or scope; "" for tensors and ops."""
    if isinstance(item, Layer):
        return item.path
    if isinstance(item, str):
        try:
            graph.as_graph_element(item)
        except (KeyError, ValueError):
            return item.rstrip("/")
    elif is_keras(item):
        layers = layers_of_keras(graph, item)
        if len(layers) == 1 and len(layers[0].outputs) == 1:
            return layers[0].path
    return ""


def similar(graph: Graph, name: str, others: Iterable[str] = ()) -> str:
    """Return in words the names that resemble one that does not exist."""
    others = list(others)
    layers = dict.fromkeys(call.path for call in keras_calls.calls_in(graph))
    ops = [op.name for op in graph.get_operations()]
    names = list(dict.fromkeys((*layers, *others, *ops)))
    alike = difflib.get_close_matches(name, [*layers, *others], 5, 0.6)
    alike += [n for n in names if name.lower() in n.lower() and n not in alike]
    alike = alike[:5] or difflib.get_close_matches(name, names, 5, 0.5)
    if alike:
        return f"similar are {alike}"
    if others:
        return f"its ends are {_listed(others)}"
    return f"there are {_listed([*layers] or ops)}"


def ops_of_layers(graph: Graph, item: Any, what: str = "the graph") -> list[Operation]:
    """Return the ops of a layer, in the order of its calls; none if there is none."""
    if isinstance(item, Layer):
        layers: Iterable[Layer] = [item]
    elif isinstance(item, str):
        layers = layers_named(graph, item)
    else:
        layers = layers_of_keras(graph, item, what)
    return types.unique(op for layer in layers for op in layer.ops)


def scopes_meant(
    graphs: Iterable[Graph], item: Any, what: str = "the graph"
) -> tuple[str, ...] | None:
    """Return the name scopes that a scope or layer corresponds to; None for None.

    Args:
        graphs: the graphs of a model.
        item: a layer, by name, path, record or as it is; or a name scope, with or
            without a slash at its end. A name that ends in a slash is a scope only.
        what: the graphs in words, for messages.

    Returns:
        The scopes of the calls of a layer; of a name that is no layer's, itself.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.select.selections import scopes_meant
        >>> scopes_meant([tf.Graph()], "block/")
        ('block',)
    """
    if item is None or item == "":
        return None
    graphs = list(graphs)
    if isinstance(item, Layer):
        return (item.scope,)
    if isinstance(item, str):
        # The slash tells a scope from a layer of the same name.
        if item.endswith("/"):
            return (item.rstrip("/"),)
        layers = [layer for g in graphs for layer in layers_named(g, item)]
        return tuple(dict.fromkeys(layer.scope for layer in layers)) or (item,)
    found, missing = [], None
    # The layer may be in one of the graphs alone: all have to lack it for a refusal.
    for graph in graphs:
        try:
            found += layers_of_keras(graph, item, what)
        except SelectionError as error:
            missing = error
    if not found and missing is not None:
        raise missing
    return tuple(dict.fromkeys(layer.scope for layer in found))


class LayerNames:
    """The paths of the layers that ops belong to."""

    def __init__(self, graph: Graph) -> None:
        calls = keras_calls.calls_in(graph)
        self._paths = {call.scope: call.path for call in calls}

    def of(self, op_name: str) -> str:
        """Return the path of the innermost layer around an op; "" if there is none."""
        for scope in types.scopes_around(op_name):
            if scope in self._paths:
                return self._paths[scope]
        return ""

    def noted(self, entries: Iterable[Entry], key: str = "op") -> list[Entry]:
        """Return entries of a report with the layers of their ops as `keras_layer`."""
        return [
            replace(entry, keras_layer=self.of(getattr(entry, key)))
            for entry in entries
        ]


def with_layer(path: str, op_name: str) -> str:
    """Return the name of an op with the layer around it in front, if there is one.

    Example:
        >>> from geutil.select.selections import with_layer
        >>> with_layer("conv", "net/conv_1/Relu"), with_layer("", "Relu")
        ('conv: net/conv_1/Relu', 'Relu')
    """
    return f"{path}: {op_name}" if path else op_name
