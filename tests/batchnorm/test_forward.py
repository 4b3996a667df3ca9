"""Norms that no layer comes before are folded into the layer behind them."""

import tensorflow as tf

from tests.batchnorm.checking import TURNED, check_bare, check_together


def image(b, size=5, **options):
    return b.norm(b.data(2, size, size, 3, **options))


def rows(b):
    return b.norm(b.data(2, 5, 3))


def conv(b, y, window=2, count=3, stride=1, **options):
    weights = b.weights(window, window, count, 4)
    return tf.nn.conv2d(y, weights, stride, "VALID", **options)


def concatenated(b):
    return b.norm(tf.concat([b.data(2, 5, 5, 1), b.data(2, 5, 5, 2)], -1))


def added(b):
    return b.norm(b.data(2, 5, 5, 3) + b.data(2, 5, 5, 3))


def scaled(b):
    return tf.identity(b.norm(b.data(2, 5, 5, 3)) * 2.0 - b.weights(3))


# Layers behind a norm, before their bias.
LAYERS = {
    "conv of one": lambda b: conv(b, image(b), 1),
    "conv": lambda b: conv(b, image(b, 6, known=(0,)), 3, stride=2),
    "conv1d": lambda b: tf.nn.conv1d(
        b.norm(b.data(2, 9, 3, known=(0,))), b.weights(3, 3, 4), 1, "VALID"
    ),
    "conv3d": lambda b: tf.nn.conv3d(
        b.norm(b.data(2, 4, 4, 4, 3)), b.weights(2, 2, 2, 3, 4), [1] * 5, "VALID"
    ),
    "depthwise": lambda b: tf.nn.depthwise_conv2d(
        image(b, 6), b.weights(3, 3, 3, 2), [1] * 4, "VALID"
    ),
    "dense": lambda b: tf.matmul(b.norm(b.data(5, 3)), b.weights(3, 4)),
    "dense, turned": lambda b: tf.matmul(
        b.norm(b.data(5, 3)), b.weights(4, 3), transpose_b=True
    ),
    "dense of rank 3": lambda b: tf.tensordot(rows(b), b.weights(3, 4), [[2], [0]]),
    "einsum": lambda b: tf.einsum("abc,cd->abd", rows(b), b.weights(3, 4)),
    "concatenated": lambda b: conv(b, concatenated(b), 1),
    "added": lambda b: conv(b, added(b), 1),
    "by hand": lambda b: conv(b, b.by_hand(b.data(2, 5, 5, 3))),
    "fused": lambda b: conv(b, b.fused(b.data(2, 5, 5, 3))),
    "one channel": lambda b: conv(b, b.norm(b.data(2, 6, 6, 1)), 3, 1, 2),
    "transposed of one": lambda b: tf.nn.conv2d_transpose(
        image(b, 4), b.weights(1, 1, 4, 3), [2, 4, 4, 4], 1
    ),
    "scaled": lambda b: conv(b, scaled(b)),
}


def biased(layer):
    def build(b):
        y = layer(b)
        return y + b.weights(y.shape[-1])

    return build


def without_bias(b):
    return conv(b, image(b, 6), 3, dilations=2)


def with_bias_add(b):
    return tf.nn.bias_add(conv(b, image(b, 6), 3), b.weights(4))


def before_and_behind(b):
    y = b.norm(b.data(2, 6, 6, 3), 3, "before")
    return b.norm(conv(b, y, 3) + b.weights(4), 4, "behind")


def before_each_other(b):
    y = b.norm(b.data(2, 6, 6, 3), 3, "first")
    y = b.norm(b.norm(tf.identity(y), 3, "second"), 3, "third")
    return conv(b, y, 3) + b.weights(4)


@TURNED
def test_layers_take_in_the_norm_before_them(parameters):
    builds = {name: biased(layer) for name, layer in LAYERS.items()}
    builds |= {"without bias": without_bias, "bias add": with_bias_add}
    builds |= {"both": before_and_behind, "three": before_each_other}

    def check(name, outcome):
        norms = {"both": 2, "three": 3}.get(name, 1)
        check_bare(outcome, norms, additions_left=2 if name == "added" else 1)
        forward = [entry.forward for entry in outcome.report.folded]
        assert sorted(forward) == ([False, True] if norms == 2 else [True] * norms)

    check_together(builds, check, parameters)


def shiftless(b, *shape):
    x, zero = b.data(*shape, 3), tf.zeros([3])
    return tf.nn.batch_normalization(x, zero, b.positive(3), zero, b.positive(3), 1e-3)


def padded(b, padding):
    return tf.nn.conv2d(shiftless(b, 2, 6, 6), b.weights(3, 3, 3, 4), 2, padding)


SHIFTLESS = {
    "padded": biased(lambda b: padded(b, "SAME")),
    "padded explicitly": biased(lambda b: padded(b, [[0, 0], [1, 1], [2, 0], [0, 0]])),
    "transposed": biased(
        lambda b: tf.nn.conv2d_transpose(
            shiftless(b, 2, 4, 4), b.weights(3, 3, 4, 3), [2, 8, 8, 4], 2
        )
    ),
    "heads": lambda b: tf.einsum(
        "abc,cde->abde", shiftless(b, 2, 5), b.weights(3, 2, 4)
    ),
    "batched": biased(lambda b: tf.matmul(shiftless(b, 2, 5), b.weights(2, 3, 4))),
}


def test_a_norm_that_does_not_shift_goes_where_others_cannot():
    def check(name, outcome):
        check_bare(outcome, additions_left=int(name != "heads"))

    check_together(SHIFTLESS, check, ["constants"])
