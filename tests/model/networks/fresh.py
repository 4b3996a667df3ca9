"""Runs SavedModels in fresh processes, with TensorFlow alone."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

Calls = list[tuple[Any, ...]]


class FreshProcesses:
    """Gives each request a process that has imported TensorFlow and done no more.

    A server imports TensorFlow once and forks for each request; it never imports
    geutil.
    """

    def __init__(self) -> None:
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        environment.pop("PYTHONPATH", None)
        server = Path(__file__).with_name("fresh_server.py")
        self._server = subprocess.Popen(
            [sys.executable, str(server)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            env=environment,
        )

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
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        pickle.dump((str(path.resolve()), calls, plain), self._server.stdin)
        self._server.stdin.flush()
        error, results = pickle.load(self._server.stdout)
        assert not error, f"in the fresh process: {error}"
        return results

    def run(
        self, path: Path, inputs: dict[str, Any], signature: str = "serving_default"
    ) -> dict[str, np.ndarray]:
        """Return the outputs of one signature."""
        (outputs,) = self.do(path, [("run", signature, inputs)])
        return outputs

    def close(self) -> None:
        self._server.stdin.close()
        self._server.wait(60)
