"""The Keras objects behind a graph: calls of layers, their losses, training flags.

Keras opens a name scope for each call of a layer. TensorFlow makes the name of a scope
unique: a layer `conv` may be in scope `net_1/conv_1`, while a layer `conv_1` is in
`net_1/conv_1_2`. So a scope's name does not tell the layer's. Where the model is there,
its calls are recorded; where a file holds the graph alone, they are found by doing over
how Keras opened the scopes.

Keras 3 opens two scopes for each call, the first of them to build the layer, which adds
no ops to a graph when the layer is built already. tf_keras opens one, and its
SavedModels hold the names of the layers.

Keras freezes layers by flags of its own: `keras.Variable.trainable`, or that of a
layer. The `tf.Variable` behind it stays trainable, and knows nothing of its owners; nor
does a function that captured it. So owners are looked for among all objects.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from geutil.graph.state import slot
from geutil.graph.types import Graph, Tensor, is_tensor, scopes_around
from geutil.graph.walks import closure, tree

_NOTED = "_geutil_trainable"
_OWNERS = "_geutil_owners"
_KINDS = (
    ("keras", "Variable", "_value"),
    ("keras", "Layer", "_trainable_variables"),
    ("tf_keras", "layers.Layer", "_trainable_weights"),
)
"""Package and class of each owner of a flag, and the attribute with its variables."""


def set_trainable(variable: tf.Variable, trainable: bool) -> None:
    """Note whether a variable is trained; the variable stays as it is."""
    # That cannot be changed for good without breaking the layer when it is thawed
    # again.
    setattr(variable, _NOTED, trainable)


def trained(variables: Iterable[tf.Variable]) -> tuple[tf.Variable, ...]:
    """Return those of some variables that are trained."""
    # A variable is, unless it says otherwise itself, or one of its owners does now, or
    # `set_trainable` did. One pass over all objects that Python's garbage collector
    # knows (some 0.06 s for each million), at the first question.
    variables = tuple(variables)
    _find_owners([v for v in variables if not hasattr(v, _OWNERS)])
    return tuple(v for v in variables if _is_trained(v))


def _is_trained(variable: tf.Variable) -> bool:
    flags = [bool(variable.trainable), getattr(variable, _NOTED, True)]
    for reference, flag in getattr(variable, _OWNERS):
        owner = reference()
        flags.append(flag if owner is None else owner.trainable)
    return all(flags)


def note_owners(model: Any, variables: Iterable[tf.Variable]) -> None:
    """Note the owners of the variables of a Keras model, which may go away."""
    variables = list(variables)
    kinds = _kinds()
    owners = [*model.variables, *model._flatten_layers()]
    owned = [(owner, _owned_by(owner, kinds)) for owner in owners]
    _note(variables, [(model, variables), *owned])


def _find_owners(variables: Sequence[tf.Variable]) -> None:
    """Look for the owners of variables among all objects."""
    if variables:
        _note(variables, _owners())


def _note(
    variables: Iterable[tf.Variable], owners: Iterable[tuple[Any, Iterable[Any]]]
) -> None:
    """Note the owners of variables, weakly, and their flags in case they go away."""
    notes: dict[int, list[Any]] = {}
    for variable in variables:
        notes[id(variable)] = []
        setattr(variable, _OWNERS, notes[id(variable)])
    for owner, owned in owners:
        # A layer whose construction ended in an error has no flag yet.
        note = weakref.ref(owner), bool(getattr(owner, "trainable", True))
        for variable in owned:
            notes.get(id(variable), []).append(note)


def _owners() -> Iterator[tuple[Any, list[Any]]]:
    """Yield the objects of Keras that have a flag, with their variables."""
    kinds = _kinds()
    for owner in _alive([kind for kind, _ in kinds]):
        yield owner, _owned_by(owner, kinds)


def _alive(kinds: Sequence[type]) -> list[Any]:
    """Return the objects of classes and of their subclasses."""
    classes = closure(kinds, type.__subclasses__)
    if not classes:
        return []
    # `issubclass` takes four times as long, and there are many objects.
    return [one for one in gc.get_objects() if type(one) in classes]


def _owned_by(owner: Any, kinds: Iterable[tuple[Any, str]]) -> list[Any]:
    """Return the variables of TensorFlow that an object of Keras has itself."""
    owned = []
    for kind, attribute in kinds:
        if isinstance(owner, kind) and hasattr(owner, attribute):
            held = getattr(owner, attribute)
            listed = held if isinstance(held, list | tuple) else [held]
            # Keras 3 wraps the variable of TensorFlow.
            owned += [getattr(v, "_value", v) for v in listed]
    return owned


def _kinds() -> list[tuple[Any, str]]:
    """Return the classes that are imported, with the attribute of each."""
    kinds = []
    for package, path, attribute in _KINDS:
        kind: Any = sys.modules.get(package)
        for name in path.split("."):
            kind = getattr(kind, name, None)
        if kind is not None:
            kinds.append((kind, attribute))
    return kinds


@contextmanager
def flags_as_noted(variables: Iterable[tf.Variable]) -> Iterator[None]:
    """Set the flags of the variables themselves as noted, while a block runs."""
    variables = tuple(variables)
    kept = frozenset(map(id, trained(variables)))
    frozen = [v for v in variables if v.trainable and id(v) not in kept]
    for variable in frozen:
        variable._trainable = False
    try:
        yield
    finally:
        for variable in frozen:
            variable._trainable = True


_HELD = ("_losses", "_eager_losses")
"""The lists of a layer: of Keras 3 the first, of tf_keras both; calls fill the last."""


@dataclass(frozen=True)
class LosingLayer:
    """A Keras layer that was given losses in a graph."""

    layer: weakref.ref[Any]
    losses: Sequence[Tensor]  # The losses, which it does not hold any more.
    # True if it forgot those that it had before, as the outermost layer does.
    anew: bool

    def hold(self, losses: Sequence[Tensor]) -> None:
        """Let the layer, if it lives, hold its losses of one call."""
        for held in _lists(self.layer())[-1:]:
            if self.anew:
                held.clear()
            held.extend(losses)


@contextmanager
def losses_taken(owner: Any = None) -> Iterator[list[LosingLayer]]:
    """Take away the losses that Keras layers are given in a block."""
    graph = tf.compat.v1.get_default_graph()
    # An eager mark is of no graph, so it is never taken for a loss of this one.
    with tf.init_scope():
        mark = tf.zeros([])
    marked = [held for layer in _layers(owner) for held in _lists(layer)]
    for held in marked:
        held.append(mark)
    found: list[LosingLayer] = []
    try:
        yield found
    finally:
        # The block may have made layers: they are asked for again.
        for layer in _layers(owner):
            lists = _lists(layer)
            # A layer that forgot its losses has lost the mark with them.
            anew = not any(t is mark for held in lists[-1:] for t in held)
            losses = [t for held in lists for t in held if _is_of(t, graph)]
            if losses:
                found.append(LosingLayer(weakref.ref(layer), losses, anew))
            marked += lists
        # Changed in place, because Keras holds these very lists.
        for held in marked:
            held[:] = [t for t in held if t is not mark and not _is_of(t, graph)]


def _layers(owner: Any) -> list[Any]:
    """Return the layers of a model; of all objects, in no certain order, for None."""
    if owner is not None:
        return list(owner._flatten_layers())
    return _alive([kind for kind, attribute in _kinds() if attribute != "_value"])


def _lists(layer: Any) -> list[list[Any]]:
    found = (getattr(layer, name, None) for name in _HELD)
    return [held for held in found if isinstance(held, list)]


def _is_of(loss: Any, graph: Any) -> bool:
    return is_tensor(loss) and loss.graph is graph


INPUT_LAYER = "InputLayer"


@dataclass(frozen=True)
class LayerCall:
    """A call of a Keras layer in a graph."""

    # The names of the models and layers around it and its own, between slashes.
    path: str
    name: str
    class_name: str
    scope: str  # The name scope of its ops; the name of its op if it has no scope.
    # The tensors that it was called with, by name; None if not known.
    inputs: tuple[str, ...] | None = None
    # The tensors that it returned, by name; None if not known.
    outputs: tuple[str, ...] | None = None
    # A weak reference to the layer, if there was one.
    layer: Callable[[], Any] | None = field(default=None, compare=False, repr=False)
    # Its number among the calls of the layer that Keras knows.
    node: int | None = field(default=None, compare=False, repr=False)

    def renamed(self, renamed: Callable[[str], str]) -> LayerCall:
        """Return the call in a graph whose ops and tensors have other names."""
        return replace(
            self,
            scope=renamed(self.scope),
            inputs=None if self.inputs is None else tuple(map(renamed, self.inputs)),
            outputs=None if self.outputs is None else tuple(map(renamed, self.outputs)),
        )


class _Calls(list[LayerCall]):
    """The calls of layers that a graph was traced from."""


def calls_in(graph: Graph) -> tuple[LayerCall, ...]:
    """Return the calls of layers that are known of a graph."""
    return tuple(slot(graph, _Calls))


def set_calls(graph: Graph, calls: Iterable[LayerCall]) -> None:
    """Note the calls of layers that a graph was traced from."""
    slot(graph, _Calls)[:] = calls


def node_behind(keras_tensor: Any) -> tuple[Any, int, int] | None:
    """Return layer, number of call and of result behind a Keras tensor, or None."""
    history = getattr(keras_tensor, "_keras_history", None)
    return None if history is None else (history[0], history[1], history[2])


def is_layer(obj: Any) -> bool:
    """Return whether something is a layer of Keras or of tf_keras, or an operation."""
    return hasattr(obj, "_inbound_nodes") and isinstance(
        getattr(obj, "name", None), str
    )


# One at a time: a recording puts functions in the place of the layers' own.
_RECORDING = threading.RLock()


@contextmanager
def recorded(model: Any) -> Iterator[list[LayerCall]]:
    """Record the calls of a Keras model's layers while the block traces it."""
    with _RECORDING:
        recording = _Recording()
        operations = _operations(model)
        put: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for operation in operations:
                attributes = vars(operation)
                for method in ("call", "quantized_call"):
                    if hasattr(operation, method):
                        put.append((attributes, method, attributes.get(method)))
                        # Past `__setattr__`, by which Keras tracks what a layer holds.
                        attributes[method] = recording.of(operation, method)
            yield recording.calls
        finally:
            for attributes, method, old in put:
                if old is None:
                    del attributes[method]
                else:
                    attributes[method] = old


def _operations(model: Any) -> list[Any]:
    """Return the layers of a model, however deep, and its other operations."""
    flatten = getattr(model, "_flatten_layers", None)
    layers = [model] if flatten is None else list(flatten())
    more = (o for layer in layers for o in getattr(layer, "operations", None) or ())
    return list({id(o): o for o in (*layers, *more)}.values())


@dataclass
class _Frame:
    """A call that runs."""

    path: str
    scope: str
    nodes: dict[int, Iterator[int]]


class _Recording:
    """The calls of layers in one graph, so far."""

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []
        self._graph: Graph | None = None
        self._frames: list[_Frame] = []

    def of(self, operation: Any, method: str) -> Callable[..., Any]:
        """Return a method of a layer that is recorded."""
        original = getattr(operation, method)

        @functools.wraps(original)
        def recorded_method(*args: Any, **kwargs: Any) -> Any:
            return self._run(operation, original, args, kwargs)

        return tf.autograph.experimental.do_not_convert(recorded_method)

    def _run(self, operation: Any, original: Any, args: Any, kwargs: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        if self._graph is None:
            self._graph = graph
        # The bodies of loops are graphs of their own.
        if tf.executing_eagerly() or graph is not self._graph:
            return original(*args, **kwargs)
        parent = self._frames[-1] if self._frames else None
        scope = graph.get_name_scope()
        node = _next_node(parent, operation)
        path = _joined(parent.path if parent else "", operation.name)
        frame = _Frame(path if parent else "", scope, _nodes_in_order(operation))
        # A wrapper that calls `call` itself, and an operation that is no layer, have
        # the scope that they are called in.
        has_scope = parent is not None and scope != parent.scope
        if parent is not None and not has_scope:
            frame.path = parent.path
        place = len(self.calls)
        self._frames.append(frame)
        try:
            result = original(*args, **kwargs)
        finally:
            self._frames.pop()
        outputs = self._tensors(result)
        if parent is None or not (has_scope or self._is_operation(operation, outputs)):
            return result
        self.calls.insert(
            place,
            LayerCall(
                path,
                operation.name,
                type(operation).__name__,
                scope if has_scope else outputs[0].op.name,
                tuple(t.name for t in self._tensors((args, kwargs))),
                tuple(t.name for t in outputs),
                weakref.ref(operation),
                node,
            ),
        )
        return result

    def _tensors(self, structure: Any) -> list[Any]:
        flat = tf.nest.flatten(structure, expand_composites=True)
        return [t for t in flat if is_tensor(t) and t.graph is self._graph]

    @staticmethod
    def _is_operation(operation: Any, outputs: list[Any]) -> bool:
        return not hasattr(operation, "weights") and len(outputs) == 1


def _next_node(parent: _Frame | None, operation: Any) -> int | None:
    """Return which call of an operation this is, for the model that makes it."""
    nodes = parent.nodes.get(id(operation)) if parent is not None else None
    return next(nodes, None) if nodes is not None else None


def _nodes_in_order(model: Any) -> dict[int, Iterator[int]]:
    """Return, by the id of each operation, the numbers of its calls as a model runs."""
    # A Sequential has a functional model inside.
    model = getattr(model, "_functional", None) or model
    by_depth = getattr(model, "_nodes_by_depth", None) or {}
    order: dict[int, list[int]] = {}
    for depth in sorted(by_depth, reverse=True):
        for node in by_depth[depth]:
            operation = getattr(node, "operation", None) or getattr(node, "layer", None)
            if operation is None or node.is_input:
                continue
            places = [n is node for n in operation._inbound_nodes]
            if True in places:
                order.setdefault(id(operation), []).append(places.index(True))
    return {key: iter(nodes) for key, nodes in order.items()}


def _joined(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def calls_by_scopes(
    names: Iterable[str],
    classes: Mapping[str, str] | None,
    variables: Iterable[str] = (),
) -> tuple[LayerCall, ...]:
    """Return the calls of layers that the names of ops tell, without the model."""
    # `classes` has the class of each layer by its path, where a file says them: one
    # scope is taken to be opened for each call then. Keras 3 opens two, and calls
    # variables by the paths of layers: without such a variable, the graph is not taken
    # for one of Keras.
    children = _tree(names)
    owners = {name.rpartition("/")[0] for name in variables}
    # Those of a subclassed model begin with its own name.
    owners |= {owner.partition("/")[2] for owner in owners}
    # Names that tf_keras accepts have slashes in them, which make scopes of their own.
    paths = owners
    if classes is not None:
        paths = {around for path in classes for around in scopes_around(path)}
    opened = _opened_twice if classes is None else _opened_once

    def inside(place: tuple[str, str]) -> list[tuple[str, str]]:
        scope, path = place
        below = list(children.get(scope, {}))
        openers = opened(below, _Known(path, paths))
        return [
            (child, _joined(path, opener))
            for child, opener in zip(below, openers, strict=True)
            if opener is not None and child in children
        ]

    calls = []
    # The model itself has a scope around those of its layers.
    for scope, path in tree([(scope, "") for scope in children.get("", {})], inside):
        if path and (classes is None or path in classes):
            name = path.rpartition("/")[2]
            calls.append(LayerCall(path, name, (classes or {}).get(path, ""), scope))
    if classes is None and owners.isdisjoint(call.path for call in calls):
        return ()
    return tuple(calls)


def _tree(names: Iterable[str]) -> dict[str, dict[str, None]]:
    """Return the ops and scopes in each scope, in the order in which ops come."""
    children: dict[str, dict[str, None]] = {}
    for name in names:
        is_new = True
        while name and is_new:
            scope = name.rpartition("/")[0]
            siblings = children.setdefault(scope, {})
            is_new = name not in siblings
            siblings[name] = None
            name = scope
    return children


@dataclass(frozen=True)
class _Known:
    """Tells which layers in a layer or model are known to be there."""

    path: str
    paths: Collection[str]

    def __contains__(self, name: object) -> bool:
        return _joined(self.path, str(name)) in self.paths


def _opened_twice(scopes: list[str], known: _Known) -> list[str | None]:
    """Return which layer opened each scope, if two are opened for each call."""
    # TensorFlow's rule for names is done over from the first name to the last: the
    # second scope that a layer opens is the one that is found. A name that no layer
    # would have got by that was made by something else.
    used: dict[str, int] = {}
    found: list[str | None] = []
    for scope in (name.rpartition("/")[2] for name in scopes):
        opener = None
        for base in _bases(scope):
            trial = _Unique(used)
            opened = [trial(base), trial(base)]
            # Calls that no output needs have left no ops.
            while (
                base in known and scope not in opened and len(opened) < 2 * _MOST_UNSEEN
            ):
                opened += [trial(base), trial(base)]
            if opened[-1] == scope:
                opener = base
                break
        else:
            trial = _Unique(used)
            trial(scope)
        used.update(trial.changed)
        found.append(opener)
    return found


_MOST_UNSEEN = 16
"""So many calls may have left no ops since the last one that did."""


def _bases(scope: str) -> Iterator[str]:
    """Yield the names that a scope may have had without numbers, longest first."""
    base, mark, number = scope.rpartition("_")
    while mark and base and number.isdigit():
        yield base
        base, mark, number = base.rpartition("_")


class _Unique:
    """Names made unique as `tf.Graph.unique_name` does, on trial."""

    def __init__(self, used: Mapping[str, int]) -> None:
        self._used = used
        self.changed: dict[str, int] = {}

    def __call__(self, name: str) -> str:
        key = base = name.lower()
        number = self._count(key)
        self.changed[key] = number + 1
        if not number:
            return name
        while self._count(key):
            key = f"{base}_{number}"
            number += 1
        self.changed[key] = 1
        return f"{name}_{number - 1}"

    def _count(self, key: str) -> int:
        return self.changed.get(key, self._used.get(key, 0))


def _opened_once(scopes: list[str], known: _Known) -> list[str | None]:
    """Return which layer opened each scope, among layers whose names are known."""
    found: list[str | None] = []
    for scope in (name.rpartition("/")[2] for name in scopes):
        bases = (scope, *_bases(scope))
        found.append(next((base for base in bases if base in known), None))
    return found
