"""The settings in which the compatible surface must work.

| setting | graph | behaviour |
|---|---|---|
| `graph` | a `tf.Graph` run by a Session | TensorFlow 2 |
| `func_graph` | the FuncGraph of a `tf.function`, while it traces | TensorFlow 2 |
| `v1_graph` | a `tf.Graph` run by a Session | `disable_v2_behavior()` |

The last one holds for a whole process: `tests/test_v1_behavior.py` runs the tests again
in one with `GEUTIL_TEST_V1=1`.

Functions import TensorFlow, since the process that hands out the tests reads this, too,
and does without.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    import tensorflow as tf

V1_VARIABLE = "GEUTIL_TEST_V1"
V1 = os.environ.get(V1_VARIABLE) == "1"
needs_eager = pytest.mark.skipif(V1, reason="needs eager execution")
"""Marks tests whose reference is computed eagerly."""
slow = pytest.mark.skipif(V1, reason="takes long, and once is enough")
"""Marks tests that run in one setting only."""
NAMES = ("v1_graph",) if V1 else ("graph", "func_graph")


@dataclass(frozen=True)
class Setting:
    name: str

    def run(self, body: Callable[[], Any]) -> list[np.ndarray]:
        """Call `body` with a new default graph; return the values of its tensors."""
        import tensorflow as tf

        if self.name == "func_graph":
            return self._trace(body)
        with tf.Graph().as_default() as graph:
            tensors = body()
        return evaluate(graph, tensors or [])

    def _trace(self, body: Callable[[], Any]) -> list[np.ndarray]:
        import tensorflow as tf

        @tf.function(autograph=False)
        def traced() -> Any:
            return tuple(body() or ())

        return [np.asarray(value) for value in traced()]


@contextlib.contextmanager
def control_flow(version: int) -> Iterator[None]:
    """Let loops and conditionals be Enter and Switch (1), or While and If (2)."""
    import tensorflow as tf

    choices = {
        1: tf.compat.v1.disable_control_flow_v2,
        2: tf.compat.v1.enable_control_flow_v2,
    }
    before = 2 if tf.compat.v1.control_flow_v2_enabled() else 1
    choices[version]()
    try:
        yield
    finally:
        choices[before]()


def in_each_setting(test: Callable[..., Any]) -> Callable[..., None]:
    """Decorate a test that runs with a new default graph in each setting in turn."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        for name in NAMES:
            print("setting:", name)
            Setting(name).run(lambda: test(**arguments))

    return run


def evaluate(
    graph: tf.Graph, tensors: Any, feed: dict[Any, Any] | None = None
) -> list[np.ndarray]:
    """Return the values of tensors of a `tf.Graph`, variables initialized."""
    import tensorflow as tf

    with graph.as_default():
        config = tf.compat.v1.ConfigProto(
            inter_op_parallelism_threads=1, intra_op_parallelism_threads=1
        )
        # A reference must be beyond doubt: Grappler folds AddN(AddN(x, x)) even where
        # the inner sum is fed, and returns what would be computed without the feed.
        config.graph_options.rewrite_options.disable_meta_optimizer = bool(feed)
        with tf.compat.v1.Session(graph=graph, config=config) as session:
            initializers = [
                v.initializer
                for v in tf.compat.v1.get_collection(
                    tf.compat.v1.GraphKeys.GLOBAL_VARIABLES
                )
            ]
            session.run(initializers)
            return [np.asarray(value) for value in session.run(list(tensors), feed)]


def default_graph() -> tf.Graph:
    import tensorflow as tf

    return tf.compat.v1.get_default_graph()


def names(elements: Any) -> list[str]:
    return [element.name for element in elements]


def edges(graph: tf.Graph) -> dict[str, tuple[list[str], list[str]]]:
    """Return the inputs and control inputs of every op, to compare two states."""
    return {
        op.name: (names(op.inputs), sorted(names(op.control_inputs)))
        for op in graph.get_operations()
    }
