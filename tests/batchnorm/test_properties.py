"""What holds for every stack of layers and norms."""

from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tests.batchnorm.checking import PARAMETERS, Builder, folded
from tests.thorough import examples

SIZE = 6


@dataclass(frozen=True)
class Block:
    """A layer, a norm, and what lies between and behind.

    Attributes:
        layer, between, norm, behind: which of the functions below, by name.
        read: whether something else reads the layer, too.
    """

    layer: str
    between: tuple[str, ...]
    norm: str
    behind: str
    read: bool


def _weights(b, *shape):
    """Weights that are neither large nor all small: the data stays in range."""
    value = b.random.uniform(0.5, 1.5, shape) * b.random.choice([-1.0, 1.0], shape)
    return b.parameter(value / np.sqrt(np.prod(shape[:-1])))


def _conv(window, padding, dilations=1, groups=1):
    def build(b, x):
        count = x.shape[-1]
        weights = _weights(b, window, window, count // groups, count)
        return tf.nn.conv2d(x, weights, 1, padding, dilations=dilations)

    return build


def _transposed(b, x):
    count = x.shape[-1]
    return tf.nn.conv2d_transpose(
        x, _weights(b, 3, 3, count, count), tf.shape(x), 1, "SAME"
    )


LAYERS = {
    "same": _conv(3, "SAME"),
    "single": _conv(1, "SAME"),
    "dilated": _conv(2, "SAME", dilations=2),
    "groups": _conv(3, "SAME", groups=2),
    "transposed": _transposed,
    "depthwise": lambda b, x: tf.nn.depthwise_conv2d(
        x, _weights(b, 3, 3, x.shape[-1], 1), [1] * 4, "SAME"
    ),
    "dense": lambda b, x: tf.tensordot(
        x, _weights(b, x.shape[-1], x.shape[-1]), [[3], [0]]
    ),
    "einsum": lambda b, x: tf.einsum(
        "abcd,ed->abce", x, _weights(b, x.shape[-1], x.shape[-1])
    ),
    "none": lambda b, x: x,
}
LINEAR = {
    "bias": lambda b, y: tf.nn.bias_add(y, b.weights(y.shape[-1])),
    "add": lambda b, y: b.weights(1, 1, 1, y.shape[-1]) + y,
    "subtract": lambda b, y: y - b.weights(),
    "identity": lambda b, y: tf.identity(y),
    "reshape": lambda b, y: tf.reshape(
        tf.reshape(y, [-1, y.shape[-1]]), [2, SIZE, SIZE, y.shape[-1]]
    ),
    "double": lambda b, y: tf.cast(tf.cast(y, tf.float64), tf.float32),
}
OTHER = {
    "relu": lambda b, y: tf.nn.leaky_relu(y),
    "residual of batch 1": lambda b, y: y + tf.reduce_mean(y, [0, 1, 2], keepdims=True),
}
NORMS = {
    "tf.nn": Builder.norm,
    "no scale": lambda b, y: b.norm(y, scale=False),
    "no center": lambda b, y: b.norm(y, center=False),
    "fused": Builder.fused,
    "by hand": Builder.by_hand,
}
BEHIND = {
    "none": lambda x, y: y,
    "relu": lambda x, y: tf.nn.leaky_relu(y),
    "bypass": lambda x, y: x + y,
}

blocks = st.builds(
    Block,
    st.sampled_from(sorted(LAYERS)),
    st.lists(st.sampled_from(sorted({**LINEAR, **OTHER})), max_size=2).map(tuple),
    st.sampled_from(sorted(NORMS)),
    st.sampled_from(sorted(BEHIND)),
    st.booleans(),
)


def build_stack(stack, count):
    def build(b):
        x = b.data(2, SIZE, SIZE, count, known=(0, 1, 2))
        rest = []
        for index, block in enumerate(stack):
            with tf.name_scope(f"block_{index}"):
                y = LAYERS[block.layer](b, x)
                if block.read:
                    rest.append(tf.reduce_sum(y))
                for name in block.between:
                    y = {**LINEAR, **OTHER}[name](b, y)
                with tf.name_scope("normalized"):
                    y = NORMS[block.norm](b, y)
                x = BEHIND[block.behind](x, y)
        return x + 1e-3 * tf.add_n([tf.zeros([]), *rest])

    return build


def must_fold(block):
    """Tell whether the layer before a norm has to take it in."""
    return block.layer != "none" and LINEAR.keys() >= {*block.between}


@examples(30, derandomize=True)
@given(
    st.lists(blocks, min_size=1, max_size=4),
    st.sampled_from((1, 2, 4)),
    st.sampled_from(PARAMETERS),
    st.booleans(),
)
def test_stacks_compute_what_they_did(stack, count, parameters, clone_shared):
    if count == 1:
        stack = [b for b in stack if b.layer != "groups"] or stack[:1]
        count = 2 if stack[0].layer == "groups" else 1
    report = folded(
        build_stack(stack, count), parameters, clone_shared=clone_shared
    ).report
    taken = [entry.norm.split("/")[0] for entry in report.folded]
    left = [entry.norm.split("/")[0] for entry in report.refused]
    assert sorted(taken + left) == [f"block_{i}" for i in range(len(stack))]
    for index, block in enumerate(stack):
        if must_fold(block) and (clone_shared or not block.read):
            assert f"block_{index}" in taken, report
