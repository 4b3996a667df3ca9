"""Small models, made anew for each run of the tests.

`python -m tests.model.samples FOLDER` writes them. In a process of their own they come
out the same each time: TensorFlow numbers functions by process.
"""

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf
from google.protobuf import text_format

from tests.processes import run_python
from tests.settings import control_flow

tf1 = tf.compat.v1


def frozen_graph_def():
    """Return a graph with loops of both versions, a call, a Switch, strings."""
    function = tf.function(_called, input_signature=[tf.TensorSpec([None, 4])])
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [None, 4], name="x")
        weights = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
        y = tf.nn.relu(x @ tf.constant(weights, name="weights"), name="relu")
        y = tf.reshape(y, [-1, 2, 2], name="reshape")
        first, second = tf.split(y, 2, axis=1, name="split")
        y = tf.reshape(tf.concat([second, first], 1), tf.shape(x), name="again")
        y = function(y)
        with control_flow(1):
            _, y = tf1.while_loop(
                lambda i, _: i < 3, lambda i, v: (i + 1, v * 0.5), [0, y], name="old"
            )
        _, y = tf.while_loop(
            lambda i, _: i < 2, lambda i, v: (i + 1, tf.tanh(v)), [0, y], name="new"
        )
        label = tf.constant(["cat", "dog", "bird", "fish"], name="labels")
        tf.gather(label, tf.argmax(y, 1), name="label")
        tf.identity(y, name="y")
    return graph.as_graph_def()


def _called(x):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: x + 1.0, lambda: x - 1.0)


class Lookup(tf.Module):
    """Two signatures that share a variable; one reads a table with an asset."""

    def __init__(self, vocabulary):
        self.table = tf.lookup.StaticHashTable(
            tf.lookup.TextFileInitializer(
                str(vocabulary),
                tf.string,
                tf.lookup.TextFileIndex.WHOLE_LINE,
                tf.int64,
                tf.lookup.TextFileIndex.LINE_NUMBER,
            ),
            default_value=-1,
        )
        self.weight = tf.Variable(np.eye(4, 3, dtype=np.float32), name="weight")
        self.bias = tf.Variable([1.0, 2.0, 3.0], name="bias", trainable=False)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "words")])
    def look_up(self, words):
        rows = tf.maximum(self.table.lookup(words), 0)
        return {"rows": tf.gather(self.weight, rows)}

    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32, "x")])
    def project(self, x):
        return {"y": x @ self.weight + self.bias}


def save_lookup(folder):
    """Save a SavedModel with variables, a table, an asset and two signatures."""
    vocabulary = folder / "vocabulary.txt"
    vocabulary.write_text("cat\ndog\nbird\nfish\n")
    module = Lookup(vocabulary)
    target = folder / "lookup"
    signatures = {"look_up": module.look_up, "project": module.project}
    tf.saved_model.save(module, str(target), signatures=signatures)
    return target


def write_all(folder):
    """Write a model of each kind, in a process of its own."""
    child = run_python("-m", "tests.model.samples", folder)
    if child.returncode:
        raise RuntimeError(child.stderr.decode())


def main():
    folder = Path(sys.argv[1])
    graph_def = frozen_graph_def()
    binary, text = folder / "frozen.pb", folder / "frozen.pbtxt"
    binary.write_bytes(graph_def.SerializeToString(deterministic=True))
    text.write_text(text_format.MessageToString(graph_def))
    save_lookup(folder)


if __name__ == "__main__":
    main()
