import pytest
import tensorflow as tf

from geutil.graph.types import (
    absolute_unique_name,
    absolute_unique_names,
    is_in_scope,
    scope_basename,
    scope_dirname,
    scope_finalize,
)


@pytest.mark.parametrize(
    ("scope", "expected"),
    [("", ""), ("a", "a/"), ("a/", "a/"), ("a/b", "a/b/"), ("a/b/", "a/b/")],
)
def test_scope_finalize(scope, expected):
    assert scope_finalize(scope) == expected


@pytest.mark.parametrize(
    ("name", "scope", "expected"),
    [
        ("a", None, True),
        ("a", "", True),
        ("a", "a", True),
        ("a", "a/", True),
        ("a/b", "a", True),
        ("a/b/c", "a/b/", True),
        ("ab", "a", False),
        ("a", "a/b", False),
        ("b/a", "a", False),
    ],
)
def test_is_in_scope(name, scope, expected):
    assert is_in_scope(name, scope) is expected


@pytest.mark.parametrize(
    ("name", "dirname", "basename"),
    [
        ("", "", ""),
        ("x", "", "x"),
        ("a/x", "a/", "x"),
        ("a/b/x", "a/b/", "x"),
        ("a/b/", "a/b/", ""),
        ("a/x:0", "a/", "x:0"),
    ],
)
def test_dirname_and_basename(name, dirname, basename):
    assert scope_dirname(name) == dirname
    assert scope_basename(name) == basename
    assert scope_dirname(name) + scope_basename(name) == name


def test_unique_name_is_reserved():
    graph = tf.Graph()
    names = [absolute_unique_name(graph, "a/x") for _ in range(3)]
    assert names == ["a/x", "a/x_1", "a/x_2"]
    with graph.as_default():
        assert tf.constant(1.0, name="a/x").op.name == "a/x_3"


def test_many_unique_names():
    with tf.Graph().as_default() as graph, tf.name_scope("outer"):
        names = absolute_unique_names(graph, ["x", "a/y", "x", "x"])
        assert names == ["x", "a/y", "x_1", "x_2"]
        assert tf.constant(1.0, name="x").op.name == "outer/x"


def test_unique_name_steps_aside_for_ops_that_exist():
    with tf.Graph().as_default() as graph:
        tf.constant(1.0, name="x")
    assert absolute_unique_name(graph, "x") == "x_1"


def test_unique_name_leaves_the_current_scope_alone():
    with tf.Graph().as_default() as graph, tf.name_scope("outer"):
        assert absolute_unique_name(graph, "x") == "x"
        assert tf.constant(1.0, name="x").op.name == "outer/x"


def test_the_scope_is_put_back_after_a_refusal():
    with tf.Graph().as_default() as graph, tf.name_scope("outer"):
        with pytest.raises(AttributeError):
            absolute_unique_name(graph, None)
        assert tf.constant(1.0, name="x").op.name == "outer/x"
