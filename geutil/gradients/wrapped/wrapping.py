"""Functions, Keras layers and models whose gradients hold less."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from geutil.errors import ArgumentTypeError, SelectionError
from geutil.gradients.policies import Policy
from geutil.gradients.preparing import HOST, MIN_CHECKPOINT_SIZE, Options
from geutil.gradients.wrapped.planning import INPUTS
from geutil.gradients.wrapped.running import call_in_graph, inside_call
from geutil.graph.kinds import type_name
from geutil.graph.tapes import a_tape_is_open, converted_as_here, not_converted

F = TypeVar("F", bound=Callable[..., Any])

_MODES = ("collection", INPUTS, "memory", "speed")
_KERAS = ("keras", "tf_keras")


@not_converted
def checkpointed(
    fn: F,
    checkpoints: str | Policy = "memory",
    *,
    min_checkpoint_size: int = MIN_CHECKPOINT_SIZE,
    offload: bool | Policy = False,
    offload_device: str = HOST,
    prefetch: int = 1,
) -> F:
    """Return `fn` with gradients that recompute what would need memory to hold.

    The result is called as `fn` is, and does the same. `tf.GradientTape`,
    `tf.gradients` and `model.fit` get the same gradients from it, built as by
    `geutil.gradients.gradients`: with respect to arguments, to variables (also those
    made in the first call) and to whatever else `fn` reads from outside. It runs once
    for each call: moving averages move once, and dropout draws once. It can be called
    several times, in loops and branches, and with `jit_compile=True`. Of checkpointed
    calls inside each other, the outermost chooses.

    `last_report` tells what the gradients built last hold and recompute. Where a call
    gets plain gradients after all, a warning that names it says why.

    A Keras layer or model is changed in place, and returned: from now on its `call` is
    checkpointed, wherever the layer is already in use. Class, name, weights and saved
    files stay what they were, and `del layer.call` undoes it.

    Outside `tf.function`, a call is traced like one while a tape is open, with what
    this means: Python code runs once for each kind of arguments, arrays arrive as
    tensors, an output that nothing reads has a gradient of zeros, and losses that a
    Keras layer adds while it runs do not get out.

    Args:
        fn: a function, method, Keras layer or Keras model. Arguments and results may be
            nested, and need not be tensors.
        checkpoints: what each call holds for the backward pass. "memory": what gives
            the least predicted peak, or, in a call among several that has no use for
            checkpoints inside, only what goes into it. "inputs": always only what goes
            into the call. "speed", "collection" or a policy: as in `gradients`.
        min_checkpoint_size: as in `gradients`.
        offload: as in `gradients`.
        offload_device: as in `gradients`.
        prefetch: as in `gradients`.

    Raises:
        ArgumentTypeError: `fn` cannot be called, it is a Keras layer whose backend is
            not TensorFlow, or an option is of a wrong type.
        SelectionError: `checkpoints` is a string that is no mode.

    Cost: none before the first gradient; then that of `gradients` for the ops of the
    call.

    Source: Chen et al., "Training deep nets with sublinear memory cost", 2016,
        arXiv 1604.06174.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import checkpointed
        >>> block = checkpointed(lambda x: tf.square(tf.square(x)), "inputs")
        >>> x = tf.Variable([1.0, 2.0])
        >>> with tf.GradientTape() as tape:
        ...     y = block(x)
        >>> tape.gradient(y, x).numpy().tolist()
        [4.0, 32.0]
    """
    _check_checkpoints(checkpoints)
    options = Options(
        checkpoints, min_checkpoint_size, offload, offload_device, prefetch
    )
    if _is_layer(fn):
        # Past Keras, which would track what is assigned.
        layer: Any = fn
        object.__setattr__(layer, "call", _wrapped(layer.call, options))
        return fn
    if not callable(fn):
        raise ArgumentTypeError(
            f"expected a function, a Keras layer or a Keras model, got {type_name(fn)}"
        )
    return _wrapped(fn, options)


def _check_checkpoints(checkpoints: Any) -> None:
    if isinstance(checkpoints, str):
        if checkpoints not in _MODES:
            raise SelectionError(
                f"'{checkpoints}' is no mode of checkpoints; pass one of "
                f"{', '.join(_MODES)}, or a policy"
            )
    elif not callable(checkpoints) or isinstance(checkpoints, tf.Tensor):
        raise ArgumentTypeError(
            f"expected a mode or a policy, got {type_name(checkpoints)}; there are no "
            "tensors to choose before the call: name them by a policy such as "
            "by_name(...)"
        )


def _is_layer(fn: Any) -> bool:
    """Tell whether `fn` is a Keras layer or model, without importing Keras."""
    for name in _KERAS:
        keras = sys.modules.get(name)
        if keras is None or not isinstance(fn, keras.layers.Layer):
            continue
        backend = keras.backend.backend()
        if backend != "tensorflow":
            raise ArgumentTypeError(
                f"the backend of Keras is {backend}; checkpointed works on layers of "
                "the TensorFlow backend"
            )
        return True
    return False


def _wrapped(fn: F, options: Options) -> F:
    """Return a function that does what `fn` does."""

    @not_converted
    def run(args: Any, kwargs: Any, alone: bool) -> Any:
        function = converted_as_here(fn)
        return call_in_graph(lambda: function(*args, **kwargs), options, alone=alone)

    @tf.function
    def traced(*args: Any, **kwargs: Any) -> Any:
        return run(args, kwargs, True)

    @not_converted
    def call(args: Any, kwargs: Any) -> Any:
        if inside_call():
            return converted_as_here(fn)(*args, **kwargs)
        if not tf.executing_eagerly():
            return run(args, kwargs, False)
        return (traced if a_tape_is_open() else fn)(*args, **kwargs)

    # Autograph may convert this one, and so knows that what it calls is in its reach.
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(args, kwargs)

    return wrapper  # type: ignore[return-value]
