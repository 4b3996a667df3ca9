"""Names that users know: layers, scopes, ops and tensors, each found by one resolver.

A name means, in this order, a tensor (`conv/Relu:0`), an op, a Keras layer (by its
path, `block/conv`, or by its own name, `conv`), or a name scope. Where it fits several
of one kind, it is refused, and the candidates are listed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import tensorflow as tf

from geutil.errors import ArgumentTypeError, SelectionError
from geutil.graph import keras_calls, replicas, types
from geutil.graph.keras_calls import LayerCall
from geutil.graph.types import Graph, IdentitySet, Operation, Tensor

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
        >>> from geutil.select.names import layers_of
        >>> layers_of(tf.Graph())
        ()
    """
    calls = keras_calls.calls_in(graph)
    return tuple(layer for _, layer in _pairs(graph, calls))


def _pairs(
    graph: Graph, calls: Iterable[LayerCall]
) -> Iterator[tuple[LayerCall, Layer]]:
    """Yield calls with the layers that they are in a graph."""
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
            yield (
                call,
                Layer(
                    call.name,
                    call.path,
                    call.class_name,
                    call.scope,
                    inputs,
                    outputs,
                    tuple(ops),
                ),
            )


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
    """Tell whether something is a name, a layer, or a tensor of a Keras model."""
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
        >>> from geutil.select.names import tensor_of
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
    # Outputs are as `tensor_of` takes them; none mean all of the
    # graph.
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
    layers = tuple(layer for _, layer in _pairs(graph, fitting))
    paths = list(dict.fromkeys(layer.path for layer in layers))
    if len(paths) > 1:
        raise SelectionError(
            f"{len(paths)} layers are called '{name}'; pass one of {_listed(paths)}"
        )
    return layers


def is_keras(item: Any) -> bool:
    """Tell whether something is a layer of Keras, or a tensor of its models."""
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
    found = [layer for _, layer in _pairs(graph, own)]
    if not found:
        raise SelectionError(
            f"{what} was not made from the Keras layer '{layer.name}', or has lost it; "
            f"{similar(graph, layer.name)}"
        )
    return found


def _tensors_of_keras(graph: Graph, item: Any, what: str) -> list[Tensor]:
    if not is_keras(item):
        raise SelectionError(
            f"expected a tensor, an op, a Keras layer or a name, got "
            f"{types.type_name(item)}"
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
        >>> from geutil.select.names import scopes_meant
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
        >>> from geutil.select.names import with_layer
        >>> with_layer("conv", "net/conv_1/Relu"), with_layer("", "Relu")
        ('conv: net/conv_1/Relu', 'Relu')
    """
    return f"{path}: {op_name}" if path else op_name
