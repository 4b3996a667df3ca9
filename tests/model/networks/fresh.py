"""Runs SavedModels in fresh processes, with TensorFlow alone."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.processes import run_python

Calls = list[tuple[Any, ...]]


class FreshProcesses:
    """Gives each request a process that has imported TensorFlow and done no more."""

    def do(self, path: Path, calls: Calls, plain: bool = False) -> list[Any]:
        """Load a SavedModel and do some things with it, one after the other.

        Each of `calls` is one of

        - `("run", signature, inputs)`: the outputs as arrays, by name;
        - `("assign", name, value)`: assign to a variable of `loaded.variables`;
        - `("variables",)`: name -> (shape, trainable);
        - `("gradients", signature, inputs, output)`: the gradients of the sum of the
          output's squares, by the name of each trainable variable.

        With `plain`, TensorFlow runs the ops as they are in the graph: no Grappler.
        """
        with tempfile.TemporaryDirectory() as name:
            request, reply = Path(name, "request"), Path(name, "reply")
            request.write_bytes(pickle.dumps((str(path.resolve()), calls, plain)))
            done = run_python("-m", "tests.model.networks.fresh_child", request, reply)
            assert done.returncode == 0, f"in the process: {done.stderr.decode()}"
            results: list[Any] = pickle.loads(reply.read_bytes())
            return results

    def run(
        self, path: Path, inputs: dict[str, Any], signature: str = "serving_default"
    ) -> dict[str, np.ndarray]:
        """Return the outputs of one signature."""
        (outputs,) = self.do(path, [("run", signature, inputs)])
        return outputs
