import pytest
import tensorflow as tf

from geutil.graph.shapes import refine_shape, same_static_shape, static_dims

SHAPES = {
    "unknown": (None, None),
    "scalar": ([], ()),
    "vector": ([3], (3,)),
    "partly": ([None, 3], (-1, 3)),
    "empty": ([0, 2], (0, 2)),
}


def placeholders(*shapes):
    with tf.Graph().as_default():
        return [tf.compat.v1.placeholder(tf.float32, shape) for shape in shapes]


@pytest.mark.parametrize(("shape", "dims"), SHAPES.values(), ids=SHAPES)
def test_static_dims(shape, dims):
    (t,) = placeholders(shape)
    assert static_dims(t) == dims


@pytest.mark.parametrize("first", SHAPES)
@pytest.mark.parametrize("second", SHAPES)
def test_same_static_shape(first, second):
    a, b = placeholders(SHAPES[first][0], SHAPES[second][0])
    assert same_static_shape(a, b) is (first == second)


@pytest.mark.parametrize(
    ("target", "source", "dims"),
    [
        (None, [2, 3], (2, 3)),
        ([None, 3], [2, None], (2, 3)),
        ([2, 3], None, (2, 3)),
        ([2], [2], (2,)),
        (None, None, None),
    ],
)
def test_refine_shape(target, source, dims):
    a, b = placeholders(target, source)
    refine_shape(a, b)
    assert static_dims(a) == dims


def test_set_shape_is_seen():
    (t,) = placeholders(None)
    t.set_shape([4, None])
    assert static_dims(t) == (4, -1)
