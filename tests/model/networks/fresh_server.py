"""The server of `fresh.py`: run as a script, and forked for each request."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from typing import Any

import numpy as np
import tensorflow as tf


def main() -> None:
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # Whatever TensorFlow prints must not come between the replies.
    os.dup2(2, 1)
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(_answer(*request), pipe)
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            reply = pipe.read()
        _, status = os.waitpid(child, 0)
        if not reply:
            reply = pickle.dumps((f"the process ended with status {status}", []))
        replies.write(reply)
        replies.flush()


def _answer(
    path: str, calls: list[tuple[Any, ...]], plain: bool
) -> tuple[str, list[Any]]:
    results: list[Any] = []
    try:
        assert "geutil" not in sys.modules
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": plain})
        loaded = tf.saved_model.load(path)
        for kind, *arguments in calls:
            results.append(_ACTIONS[kind](loaded, *arguments))
    except Exception:
        return traceback.format_exc(), []
    return "", results


def _tensors(function: Any, inputs: dict[str, Any]) -> dict[str, tf.Tensor]:
    specs = function.structured_input_signature[1]
    return {n: tf.constant(v, specs[n].dtype) for n, v in inputs.items()}


def _run(loaded: Any, signature: str, inputs: dict[str, Any]) -> dict[str, Any]:
    function = loaded.signatures[signature]
    results = function(**_tensors(function, inputs))
    return {name: np.asarray(t.numpy()) for name, t in results.items()}


def _name(variable: Any) -> str:
    return str(variable.name.partition(":")[0])


def _assign(loaded: Any, name: str, value: Any) -> None:
    (variable,) = (v for v in loaded.variables if _name(v) == name)
    variable.assign(value)


def _variables(loaded: Any) -> dict[str, tuple[list[int], bool]]:
    return {_name(v): (v.shape.as_list(), v.trainable) for v in loaded.variables}


def _gradients(
    loaded: Any, signature: str, inputs: dict[str, Any], output: str
) -> dict[str, np.ndarray]:
    function = loaded.signatures[signature]
    variables = [v for v in loaded.variables if v.trainable]
    with tf.GradientTape() as tape:
        value = function(**_tensors(function, inputs))[output]
        loss = tf.reduce_sum(tf.square(value))
    gradients = tape.gradient(loss, variables)
    return {
        _name(v): g.numpy()
        for v, g in zip(variables, gradients, strict=True)
        if g is not None
    }


_ACTIONS = {
    "run": _run,
    "assign": _assign,
    "variables": _variables,
    "gradients": _gradients,
}

if __name__ == "__main__":
    main()
