"""Random differentiable graphs for property tests, as hypothesis strategies."""

from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf
from hypothesis import strategies as st

SIDE = 4
Layer = Callable[[list[tf.Tensor]], list[tf.Tensor]]


def _stack_reversed(x: tf.Tensor) -> tf.Tensor:
    rows = tf.unstack(x)
    return tf.stack(rows[::-1])


def _halves(x: tf.Tensor) -> list[tf.Tensor]:
    left, right = tf.split(x, 2, axis=1)
    return [tf.concat([left, left], 1), tf.concat([right, right], 1)]


def _normalized(x: tf.Tensor) -> tf.Tensor:
    y, _, _ = tf.compat.v1.nn.fused_batch_norm(
        tf.reshape(x, [1, 2, 2, SIDE]), tf.ones([SIDE]), tf.zeros([SIDE])
    )
    return tf.reshape(y, [SIDE, SIDE])


def _entropy(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    wanted = tf.nn.softmax(labels)
    return logits * tf.nn.softmax_cross_entropy_with_logits(wanted, logits)


def _looped(x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(
        lambda i, h: i < 2, lambda i, h: (i + 1, tf.tanh(h + x)), (0, x)
    )[1]


def _branched(x: tf.Tensor) -> tf.Tensor:
    return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.sin(x), lambda: x * x)


@tf.custom_gradient
def _steep(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    inner = tf.exp(-x * x)
    return tf.tanh(inner), lambda dy: dy * inner * x


# How many tensors each reads; it yields as many as it likes.
LAYERS: dict[str, tuple[int, Layer]] = {
    "tanh": (1, lambda ts: [tf.tanh(ts[0])]),
    "sin": (1, lambda ts: [tf.sin(ts[0])]),
    "relu": (1, lambda ts: [tf.nn.relu(ts[0])]),
    "softmax": (1, lambda ts: [tf.nn.softmax(ts[0])]),
    "transpose": (1, lambda ts: [tf.transpose(ts[0])]),
    "mean": (1, lambda ts: [ts[0] - tf.reduce_mean(ts[0], 0)]),
    "cast": (1, lambda ts: [tf.cast(tf.cast(ts[0], tf.float64), tf.float32)]),
    "stop": (1, lambda ts: [tf.stop_gradient(ts[0])]),
    "mul": (2, lambda ts: [ts[0] * ts[1]]),
    "add": (2, lambda ts: [ts[0] + ts[1]]),
    "difference": (2, lambda ts: [tf.math.squared_difference(ts[0], ts[1])]),
    "matmul": (2, lambda ts: [tf.matmul(ts[0], ts[1])]),
    "sum": (3, lambda ts: [tf.add_n(ts)]),
    "where": (3, lambda ts: [tf.where(ts[0] > 0, ts[1], ts[2])]),
    "split": (1, lambda ts: _halves(ts[0])),
    "unstack": (1, lambda ts: [_stack_reversed(ts[0])]),
    "top_k": (1, lambda ts: [tf.math.top_k(ts[0], k=SIDE)[0]]),
    "identities": (2, lambda ts: list(tf.identity_n([ts[0], ts[1]]))),
    "normalized": (1, lambda ts: [_normalized(ts[0])]),
    "entropy": (2, lambda ts: [_entropy(*ts)]),
    "custom": (1, lambda ts: [_steep(ts[0])]),
    "while": (1, lambda ts: [_looped(ts[0])]),
    "cond": (1, lambda ts: [_branched(ts[0])]),
    "constant": (0, lambda ts: [tf.fill([SIDE, SIDE], 0.5)]),
}
COUNT = 3
"""The number of sources."""


@dataclass(frozen=True)
class Network:
    """Layers, each with the positions of what it reads; the sources come first."""

    layers: tuple[tuple[str, tuple[int, ...]], ...]

    def build(
        self, watch: Callable[[tf.Tensor], None] | None = None
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Make the ops in the default graph; return the sources and all tensors.

        Args:
            watch: is told each source before it is read.
        """
        sources = [
            tf.reshape(tf.cos(tf.range(i, i + SIDE * SIDE, dtype=tf.float32)), [4, 4])
            for i in range(COUNT)
        ]
        tensors = [tf.identity(x, name="source") for x in sources]
        sources = list(tensors)
        for source in sources if watch else ():
            watch(source)
        for number, (kind, reads) in enumerate(self.layers):
            arity, layer = LAYERS[kind]
            with tf.name_scope(f"layer{number}"):
                tensors += layer([tensors[i % len(tensors)] for i in reads])
        return sources, tensors


@st.composite
def networks(draw: st.DrawFn, max_layers: int = 14) -> Network:
    kinds = sorted(LAYERS)
    layers = []
    for number in range(draw(st.integers(2, max_layers))):
        kind = draw(st.sampled_from(kinds))
        # Most layers read what was made lately, as in networks.
        recent = st.integers(max(0, number + COUNT - 3), number + COUNT - 1)
        place = st.one_of(recent, st.integers(0, number + COUNT - 1))
        layers.append((kind, tuple(draw(place) for _ in range(LAYERS[kind][0]))))
    return Network(tuple(layers))
