"""Runs SavedModels in fresh processes, with TensorFlow alone.

`python -m tests.model.networks.fresh REQUEST REPLY` is what such a process does.
"""

import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tests.processes import run_python


def do(path, calls):
    """Load a SavedModel and do some things with it, one after the other.

    Each of `calls` is one of

    - `("run", signature, inputs)`: the outputs as arrays, by name;
    - `("assign", name, value)`: assign to a variable of `loaded.variables`;
    - `("variables",)`: name -> (shape, trainable);
    - `("gradients", signature, inputs, output)`: the gradients of the sum of the
      output's squares, by the name of each trainable variable.
    """
    (results,) = do_all((path, calls))
    return results


def do_all(*jobs):
    """Do the calls on each of some SavedModels in one process."""
    with tempfile.TemporaryDirectory() as name:
        request, reply = Path(name, "request"), Path(name, "reply")
        listed = [(str(path.resolve()), calls) for path, calls in jobs]
        request.write_bytes(pickle.dumps(listed))
        done = run_python("-m", __name__, request, reply)
        assert done.returncode == 0, f"in the process: {done.stderr.decode()}"
        results: list[list[Any]] = pickle.loads(reply.read_bytes())
        return results


def run(path, inputs, signature="serving_default"):
    """Return the outputs of one signature."""
    (outputs,) = do(path, [("run", signature, inputs)])
    return outputs


def main():
    request, reply = map(Path, sys.argv[1:])
    answer = _answer(pickle.loads(request.read_bytes()))
    reply.write_bytes(pickle.dumps(answer))


def _answer(jobs):
    assert "geutil" not in sys.modules
    answers = []
    for path, calls in jobs:
        loaded = tf.saved_model.load(path)
        answers.append([_ACTIONS[kind](loaded, *rest) for kind, *rest in calls])
    return answers


def _tensors(function, inputs):
    specs = function.structured_input_signature[1]
    return {n: tf.constant(v, specs[n].dtype) for n, v in inputs.items()}


def _run(loaded, signature, inputs):
    function = loaded.signatures[signature]
    results = function(**_tensors(function, inputs))
    return {name: np.asarray(t.numpy()) for name, t in results.items()}


def _name(variable):
    return str(variable.name.partition(":")[0])


def _assign(loaded, name, value):
    (variable,) = (v for v in loaded.variables if _name(v) == name)
    variable.assign(value)


def _variables(loaded):
    return {_name(v): (v.shape.as_list(), v.trainable) for v in loaded.variables}


def _gradients(loaded, signature, inputs, output):
    function = loaded.signatures[signature]
    tensors = _tensors(function, inputs)
    variables = [v for v in loaded.variables if v.trainable]
    return gradients_of(lambda: function(**tensors)[output], variables)


def gradients_of(call, variables):
    """Return the gradients of the sum of squares, by the names of the variables."""
    with tf.GradientTape() as tape:
        squares = tf.square(call())
    found = zip(variables, tape.gradient(squares, variables), strict=True)
    return {
        _name(v): tf.convert_to_tensor(g).numpy() for v, g in found if g is not None
    }


_ACTIONS = {
    "run": _run,
    "assign": _assign,
    "variables": _variables,
    "gradients": _gradients,
}

if __name__ == "__main__":
    main()
