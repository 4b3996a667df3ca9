"""Writes models of version 1, in a process of its own.

`python -m tests.model.networks.version_1 FOLDER` writes `resource` and `ref`, two
SavedModels with a loop, a partitioned variable, a table with an asset and two
signatures; and `frozen.pb`.
"""

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1
IMAGES = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)
WORDS = ["b", "zzz", "c"]


def network(images, use_resource):
    """A convolution, a batch norm, a loop, and a partitioned matrix."""
    with tf1.variable_scope("net", use_resource=use_resource):
        kernel = tf1.get_variable("kernel", [3, 3, 3, 4])
        x = tf.nn.conv2d(images, kernel, 2, "SAME")
        shape = [4]
        gamma = tf1.get_variable("gamma", shape, initializer=tf1.ones_initializer())
        beta = tf1.get_variable("beta", shape, initializer=tf1.zeros_initializer())
        mean = tf1.get_variable("mean", shape, trainable=False)
        variance = tf1.get_variable(
            "variance", shape, trainable=False, initializer=tf1.ones_initializer()
        )
        x, *_ = tf1.nn.fused_batch_norm(
            x, gamma, beta, mean, variance, is_training=False
        )
        x = tf.nn.relu6(x)
        _, x = tf1.while_loop(
            lambda i, _: i < 3, lambda i, v: (i + 1, tf.tanh(v) * 1.5 + gamma), [0, x]
        )
        weights = tf1.get_variable(
            "weights", [64, 6], partitioner=tf1.fixed_size_partitioner(2, axis=1)
        )
        flat = tf.reshape(x, [-1, 64], name="flat")
        return tf.identity(tf.matmul(flat, tf.convert_to_tensor(weights)), "scores")


def write(folder, use_resource):
    name = "resource" if use_resource else "ref"
    vocabulary = folder / f"{name}.txt"
    vocabulary.write_text("a\nb\nc\n")
    with tf1.Graph().as_default() as graph, tf1.Session() as session:
        tf1.set_random_seed(1)
        images = tf1.placeholder(tf.float32, [None, 8, 8, 3], "in/images")
        scores = network(images, use_resource)
        words = tf1.placeholder(tf.string, [None], "words")
        table = tf.lookup.StaticVocabularyTable(
            tf.lookup.TextFileInitializer(str(vocabulary), tf.string, -2, tf.int64, -1),
            1,
        )
        ids = table.lookup(words)
        session.run([tf1.global_variables_initializer(), tf1.tables_initializer()])
        values = session.run([scores, ids], {images: IMAGES, words: WORDS})
        np.savez(folder / f"{name}.npz", scores=values[0], ids=values[1])
        define = tf1.saved_model.predict_signature_def
        builder = tf1.saved_model.Builder(str(folder / name))
        builder.add_meta_graph_and_variables(
            session,
            ["serve"],
            {
                "serving_default": define({"images": images}, {"scores": scores}),
                "ids": define({"words": words}, {"ids": ids}),
            },
            assets_collection=tf1.get_collection(tf1.GraphKeys.ASSET_FILEPATHS),
            main_op=tf1.tables_initializer(),
        )
        builder.save()
        tf1.train.Saver().save(
            session, str(folder / f"{name}.ckpt"), write_meta_graph=False
        )
        graph_def = graph.as_graph_def()
        (folder / f"{name}_raw.pb").write_bytes(graph_def.SerializeToString())
        frozen = tf1.graph_util.convert_variables_to_constants(
            session, graph_def, ["net/scores"]
        )
        (folder / f"{name}_frozen.pb").write_bytes(frozen.SerializeToString())


if __name__ == "__main__":
    tf1.disable_v2_behavior()
    for kind in (True, False):
        write(Path(sys.argv[1]), kind)
