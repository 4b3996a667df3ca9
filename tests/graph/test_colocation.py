"""Colocation in copies: the names of copied ops are those of their copies."""

import pytest
import tensorflow as tf

import geutil as ge


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([], []),
        ([b"loc:@x"], [b"loc:@copy/x"]),
        ([b"loc:@gone"], []),
        ([b"other", b"loc:@x", b"loc:@gone"], [b"other", b"loc:@copy/x"]),
        ([b"loc@x"], [b"loc@x"]),
    ],
)
def test_entries_of_a_copy(entries, expected):
    with tf.Graph().as_default() as graph:
        y = tf.identity(tf.constant(1.0, name="x"), name="y")
    value = tf.compat.v1.AttrValue()
    value.list.s.extend(entries)
    y.op._set_attr("_class", value)
    _, info = ge.copy(graph, tf.Graph(), dst_scope="copy")
    node = info.transformed(y).op.node_def
    found = list(node.attr["_class"].list.s) if "_class" in node.attr else []
    assert found == expected
