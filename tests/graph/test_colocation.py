import pytest
import tensorflow as tf

from geutil.graph.colocation import (
    class_entries,
    colocation_names,
    rename_entries,
    set_class_entries,
)


def colocated():
    with tf.Graph().as_default() as graph:
        x = tf.constant(1.0, name="x")
        with graph.colocate_with(x.op):
            y = tf.constant(2.0, name="y")
    return x.op, y.op


def test_an_op_without_colocation():
    x, _ = colocated()
    assert class_entries(x) == []
    assert colocation_names(x) == []


def test_a_colocated_op():
    _, y = colocated()
    assert class_entries(y) == [b"loc:@x"]
    assert colocation_names(y) == ["x"]


def test_entries_that_are_set_are_read_back():
    x, _ = colocated()
    entries = [b"loc:@y", b"something@else", b"loc:@x"]
    set_class_entries(x, entries)
    assert class_entries(x) == entries
    assert list(x.node_def.attr["_class"].list.s) == entries
    assert colocation_names(x) == ["y", "x"]


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
def test_rename_entries(entries, expected):
    def rename(name):
        return None if name == "gone" else f"copy/{name}"

    assert rename_entries(entries, rename) == expected
