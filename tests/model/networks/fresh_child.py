"""What a process of `fresh.py` does: `python -m ...fresh_child REQUEST REPLY`."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf


def main() -> None:
    request, reply = map(Path, sys.argv[1:])
    answer = _answer(*pickle.loads(request.read_bytes()))
    reply.write_bytes(pickle.dumps(answer))


def _answer(path: str, calls: list[tuple[Any, ...]], plain: bool) -> list[Any]:
    assert "geutil" not in sys.modules
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": plain})
    loaded = tf.saved_model.load(path)
    return [_ACTIONS[kind](loaded, *arguments) for kind, *arguments in calls]


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
        _name(v): tf.convert_to_tensor(g).numpy()
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
