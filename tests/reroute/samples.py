"""Small graphs to rewire, and a check that a refused edit leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

import geutil as ge
from tests import settings

BUILTINS = {
    ge.ArgumentTypeError: TypeError,
    ge.SelectionError: ValueError,
    ge.RerouteError: ValueError,
    ge.CycleError: ValueError,
    ge.StaleGraphError: RuntimeError,
    ge.FinalizedGraphError: RuntimeError,
}
"""What code written for `tf.contrib.graph_editor` catches."""

EAGER = None if settings.V1 else tf.constant([1.0, 2.0])
"""A tensor of no graph; there is none where eager execution is off."""

VARIABLE = None if settings.V1 else tf.Variable([1.0, 2.0])
"""A variable is no tensor, though it passes for one in most TensorFlow calls."""


def state(graph: tf.Graph) -> tuple[Any, bytes]:
    """Return all that an edit could change: every edge, every op and attribute."""
    graph_def = graph.as_graph_def()
    return settings.edges(graph), graph_def.SerializeToString(deterministic=True)


def check_refused(
    graph: tf.Graph,
    call: Callable[[], Any],
    error: type[ge.GeutilError],
    words: Sequence[str] = (),
) -> ge.GeutilError:
    """Check that `call` raises, says why, and leaves `graph` exactly as it was."""
    before = state(graph)
    with pytest.raises(error) as caught:
        call()
    assert isinstance(caught.value, ge.GeutilError)
    assert isinstance(caught.value, BUILTINS[error])
    for word in words:
        assert word in str(caught.value)
    after = state(graph)
    assert after[0] == before[0]
    assert after[1] == before[1]
    return caught.value


def inputs(*tensors: tf.Tensor) -> list[list[str]]:
    """Return the names of the inputs of the op behind each tensor."""
    return [settings.names(t.op.inputs) for t in tensors]


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
