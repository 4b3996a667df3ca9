"""Functions, Keras layers and models whose gradients hold less."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from geutil.errors import ArgumentTypeError, SelectionError
from geutil.gradients.call_planning import INPUTS
from geutil.gradients.calls import call_in_graph, inside_call
from geutil.gradients.policies import Policy
from geutil.gradients.preparing import HOST, MIN_CHECKPOINT_SIZE, Options
from geutil.graph.kinds import is_tensor, type_name
from geutil.graph.tapes import a_tape_is_open, converted_as_here, not_converted


def checkpointed(fn: Any, checkpoints: Any = "memory") -> Any:
    """..."""
    options = Options(checkpoints)
    return _wrapped(fn, options)


def _wrapped(fn: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """Return a function that does what `fn` does."""

    @not_converted
    def run(*args: Any, **kwargs: Any) -> Any:
        return call_in_graph(lambda: converted_as_here(fn)(*args, **kwargs), options)

    @not_converted
    def run_alone(*args: Any, **kwargs: Any) -> Any:
        return call_in_graph(
            lambda: converted_as_here(fn)(*args, **kwargs), options, alone=True
        )

    # Autograph converts these, and what they call runs with autograph on.
    traced = tf.function(lambda *args, **kwargs: run_alone(*args, **kwargs))

    @not_converted
    def call(*args: Any, **kwargs: Any) -> Any:
        if inside_call():
            return converted_as_here(fn)(*args, **kwargs)
        if not tf.executing_eagerly():
            return run(*args, **kwargs)
        if a_tape_is_open():
            return traced(*args, **kwargs)
        return fn(*args, **kwargs)

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return wrapper
