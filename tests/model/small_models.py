"""Small models that tests of several modules open."""

from __future__ import annotations

import numpy as np
import tensorflow as tf


def affine():
    """Return y = x * w + b with a hidden tensor, and its variables."""
    w = tf.Variable([2.0, 3.0], name="w")
    b = tf.Variable([1.0, -1.0], name="b", trainable=False)

    @tf.function(input_signature=[tf.TensorSpec([None, 2], name="x")])
    def function(x):
        hidden = tf.multiply(x, w, name="hidden")
        return {"y": tf.add(hidden, b, name="sum")}

    return function, w, b


def two_signatures():
    """Return a module with signatures `encode` and `decode` that share a variable."""
    module = tf.Module()
    module.w = tf.Variable(np.eye(3, 2, dtype=np.float32) * 2, name="weight")

    @tf.function(input_signature=[tf.TensorSpec([None, 3], name="x")])
    def encode(x):
        return {"code": tf.matmul(x, module.w)}

    @tf.function(input_signature=[tf.TensorSpec([None, 2], name="code")])
    def decode(code):
        return {"x": tf.matmul(code, module.w, transpose_b=True)}

    module.encode, module.decode = encode, decode
    return module


def save_two_signatures(path):
    module = two_signatures()
    tf.saved_model.save(
        module, str(path), {"encode": module.encode, "decode": module.decode}
    )
    return module


def version_1_graph(use_resource, vocabulary=None):
    """Return a version 1 graph with variables, a partition, a loop and a table."""
    v1 = tf.compat.v1
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [None, 3], name="in/x")
        kwargs = {"use_resource": use_resource}
        w = v1.get_variable("w", [3, 4], initializer=_normal(1), **kwargs)
        parts = v1.get_variable(
            "p",
            [4, 6],
            initializer=_normal(2),
            partitioner=v1.fixed_size_partitioner(2, axis=1),
            **kwargs,
        )
        n = v1.get_variable(
            "n", [], initializer=v1.ones_initializer(), trainable=False, **kwargs
        )
        h = tf.matmul(tf.matmul(x, w), tf.convert_to_tensor(parts)) + n
        cond = v1.while_loop(
            lambda i, _: i < 3, lambda i, a: (i + 1, a * 1.5 + 1), [tf.constant(0), h]
        )
        y = tf.identity(cond[1], name="y")
        if vocabulary is not None:
            words = v1.placeholder(tf.string, [None], name="words")
            table = tf.lookup.StaticVocabularyTable(
                tf.lookup.TextFileInitializer(
                    str(vocabulary), tf.string, -2, tf.int64, -1
                ),
                1,
            )
            tf.identity(table.lookup(words), name="ids")
    return graph, y


def _normal(seed):
    return tf.compat.v1.random_normal_initializer(seed=seed)


def save_version_1(path, use_resource, vocabulary):
    """Write the version 1 graph as a SavedModel; return its `y` for one input."""
    v1 = tf.compat.v1
    graph, y = version_1_graph(use_resource, vocabulary)
    predict = v1.saved_model.signature_def_utils.predict_signature_def

    def tensor(name):
        return graph.get_tensor_by_name(f"{name}:0")

    with graph.as_default(), v1.Session(graph=graph) as session:
        session.run([v1.global_variables_initializer(), v1.tables_initializer()])
        builder = v1.saved_model.Builder(str(path))
        builder.add_meta_graph_and_variables(
            session,
            ["serve"],
            {
                "serving_default": predict({"x": tensor("in/x")}, {"y": y}),
                "ids": predict({"words": tensor("words")}, {"ids": tensor("ids")}),
            },
            main_op=v1.tables_initializer(),
            assets_collection=graph.get_collection(v1.GraphKeys.ASSET_FILEPATHS),
        )
        builder.save()
        return session.run(y, {tensor("in/x"): [[1.0, 2.0, 3.0]]})


def control_flow_v1():
    """Return a context in which `while_loop` makes loops of version 1."""
    return _ControlFlowV1()


class _ControlFlowV1:
    def __enter__(self):
        tf.compat.v1.disable_control_flow_v2()

    def __exit__(self, *_):
        tf.compat.v1.enable_control_flow_v2()
