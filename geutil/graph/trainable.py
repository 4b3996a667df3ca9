"""Whether variables are trained, where their owner says otherwise than they do.

Keras freezes a layer by a flag of its own; the `tf.Variable` behind it stays trainable,
which cannot be changed for good without breaking the layer when it is thawed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import tensorflow as tf

_FLAG = "_geutil_trainable"


def set_trainable(variable: tf.Variable, trainable: bool) -> None:
    """Note whether the owner of a variable trains it; the variable stays as it is."""
    setattr(variable, _FLAG, trainable)


def is_trainable(variable: tf.Variable) -> bool:
    """Tell whether a variable is trained."""
    return bool(variable.trainable and getattr(variable, _FLAG, True))


@contextmanager
def flags_as_noted(variables: Iterable[tf.Variable]) -> Iterator[None]:
    """Make the variables themselves say what is noted while the block runs."""
    frozen = [v for v in variables if v.trainable and not is_trainable(v)]
    for variable in frozen:
        variable._trainable = False
    try:
        yield
    finally:
        for variable in frozen:
            variable._trainable = True
