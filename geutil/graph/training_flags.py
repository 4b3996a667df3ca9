"""The training flags of variables, as their owners have them.

Keras freezes layers by flags of its own: `keras.Variable.trainable`, or that of a
layer. The `tf.Variable` behind it stays trainable, and knows nothing of its owners; nor
does a function that captured it. So owners are looked for among all objects.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from geutil.graph.walks import closure

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


def keras_layers() -> list[Any]:
    """Return the Keras layers that there are, in no certain order."""
    return _alive([kind for kind, attribute in _kinds() if attribute != "_value"])


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
