import pytest
import tensorflow as tf

from geutil.graph.types import refine_shapes, same_static_shape

SHAPES = {
    "unknown": None,
    "scalar": [],
    "vector": [3],
    "partly": [None, 3],
    "empty": [0, 2],
}


def placeholders(*shapes):
    with tf.Graph().as_default():
        return [tf.compat.v1.placeholder(tf.float32, shape) for shape in shapes]


@pytest.mark.parametrize("first", SHAPES)
@pytest.mark.parametrize("second", SHAPES)
def test_same_static_shape(first, second):
    a, b = placeholders(SHAPES[first], SHAPES[second])
    assert same_static_shape(a, b) is (first == second)


@pytest.mark.parametrize(
    ("target", "source", "dims"),
    [
        (None, [2, 3], (2, 3)),
        ([None, 3], [2, None], (2, 3)),
        ([2, 3], None, (2, 3)),
        ([2], [2], (2,)),
    ],
)
def test_refine_shapes(target, source, dims):
    a, b = placeholders(target, source)
    assert a.shape.rank == (None if target is None else len(target))
    refine_shapes([(b.op, a.op)])
    assert a.shape.as_list() == list(dims)


def test_set_shape_is_seen():
    a, b = placeholders(None, [4, None])
    assert not same_static_shape(a, b)
    a.set_shape([4, None])
    assert same_static_shape(a, b)
