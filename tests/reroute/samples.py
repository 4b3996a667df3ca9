"""Small graphs to rewire, and what does not belong to them."""

from collections.abc import Callable
from types import SimpleNamespace

import tensorflow as tf

from tests import settings

EAGER = None if settings.V1 else tf.constant([1.0, 2.0])
"""A tensor of no graph; there is none where eager execution is off."""

VARIABLE = None if settings.V1 else tf.Variable([1.0, 2.0])
"""A variable is no tensor, though it passes for one in most TensorFlow calls."""


def inputs(*tensors: tf.Tensor) -> list[list[str]]:
    """Return the names of the inputs of the op behind each tensor."""
    return [settings.names(t.op.inputs) for t in tensors]


def wired(wiring: str) -> list[list[str]]:
    """Return the inputs of ops: "ab c" is one that reads a and b, one that reads c."""
    return [[f"{name}:0" for name in reads] for reads in wiring.split()]


def wires() -> SimpleNamespace:
    """Make tensors that are read by several ops, by several inputs of one op."""
    a = tf.constant([1.0, 2.0], name="a")
    b = tf.constant([3.0, 5.0], name="b")
    c = tf.constant([7.0, 11.0], name="c")
    return SimpleNamespace(
        graph=a.graph,
        a=a,
        b=b,
        c=c,
        p=tf.subtract(a, b, name="p"),
        q=tf.subtract(b, a, name="q"),
        r=tf.multiply(a, a, name="r"),
        s=tf.negative(b, name="s"),
        u=tf.negative(c, name="u"),
    )


def chains() -> SimpleNamespace:
    """Make a -> c -> e and b -> d -> f, w, which waits for a, and what fits nowhere."""
    a = tf.constant([1.0, 2.0], name="a")
    b = tf.constant([3.0, 5.0], name="b")
    c = tf.negative(a, name="c")
    d = tf.square(b, name="d")
    with tf.control_dependencies([a]):
        w = tf.constant([7.0, 11.0], name="w")
    whole = tf.constant([1, 2], name="whole")
    wide = tf.constant([1.0, 2.0, 3.0], name="wide")
    return SimpleNamespace(
        graph=a.graph,
        a=a,
        b=b,
        c=c,
        d=d,
        e=tf.exp(c, name="e"),
        f=tf.tanh(d, name="f"),
        w=w,
        both=tf.subtract(a, b, name="both"),
        whole=tf.negative(whole, name="whole_reader"),
        wide=tf.negative(wide, name="wide_reader"),
    )


def foreign(make: Callable[[], SimpleNamespace]) -> SimpleNamespace:
    """Make a sample in another graph than the default one."""
    with tf.Graph().as_default():
        return make()
