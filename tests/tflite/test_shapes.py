"""Tests of shapes and types by kind, against those that the interpreter allocates."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from geutil import tflite
from geutil.errors import TFLiteError
from tests.interpreter import new_interpreter
from tests.tflite_files import SAMPLES

IMAGE = tf.TensorSpec([None, 12, 10, 4], name="x")
SEQUENCE = tf.TensorSpec([None, 6, 8], name="x")
ROWS = tf.TensorSpec([4, 6], name="x")


def _weights(*shape):
    return np.random.default_rng(7).normal(size=shape).astype(np.float32)


def _convolutions(x):
    n = tf.shape(x)[0]
    return [
        tf.nn.conv2d(x, _weights(3, 3, 4, 6), (2, 1), "VALID", dilations=(1, 1)),
        tf.nn.conv2d(x, _weights(3, 2, 4, 6), 1, "SAME", dilations=2),
        tf.nn.depthwise_conv2d(x, _weights(3, 3, 4, 2), (1, 2, 2, 1), "SAME"),
        tf.nn.conv2d_transpose(
            x, _weights(2, 2, 5, 4), tf.stack([n, 24, 20, 5]), 2, "SAME"
        ),
        tf.nn.max_pool2d(x, 3, 2, "VALID"),
        tf.nn.avg_pool2d(x, (2, 3), 2, "SAME"),
        tf.nn.conv3d(x[..., None], _weights(3, 2, 2, 1, 3), (1, 1, 2, 2, 1), "VALID"),
        tf.nn.local_response_normalization(x),
        tf.nn.l2_normalize(x, -1),
        tf.image.resize(x, (7, 30)),
        tf.image.resize(x, (24, 20), "nearest"),
        tf.nn.space_to_depth(x, 2),
        tf.nn.depth_to_space(x, 2),
        tf.space_to_batch(x, [2, 5], [[0, 0], [3, 2]]),
        tf.batch_to_space(tf.tile(x, [4, 1, 1, 1]), [2, 2], [[1, 0], [0, 3]]),
        tf.nn.leaky_relu(tf.nn.relu6(x) - tf.nn.elu(x)),
    ]


def _joins(x):
    n = tf.shape(x)[0]
    parts = tf.split(x, 4, -1)
    sizes = tf.split(x, [1, 5], 1)
    rows = tf.unstack(x, axis=1)
    return [
        tf.concat([parts[0], parts[3], x], -1),
        *sizes,
        tf.stack(rows[:3], 1),
        tf.reshape(x, tf.stack([n * 2, 3, -1])),
        tf.reshape(x, [-1, 48]) @ _weights(48, 5),
        x @ tf.transpose(x, [0, 2, 1]),
        tf.matmul(x, x, transpose_a=True),
        tf.squeeze(x[:, None, :, 2:3], [1]),
        tf.expand_dims(tf.transpose(x, [1, 2, 0]), 2),
        tf.pad(x, [[0, 0], [1, 2], [0, 3]]),
        tf.pad(x, [[0, 0], [1, 2], [0, 3]], constant_values=1.0),
        tf.pad(x, [[0, 0], [1, 2], [0, 3]], "REFLECT"),
        tf.slice(x, [0, 1, 2], [-1, 3, 4]),
        x[:, ::-2, tf.newaxis, 1],
        x[..., -3:-1],
        tf.gather(x, [2, 0, 1, 5], axis=1),
        tf.gather_nd(x, [[0, 1], [0, 3]]),
        tf.tile(x, [2, 1, 3]),
        tf.broadcast_to(x[:, :1], tf.stack([n, 9, 8])),
        tf.fill(tf.stack([n, 3]), 2.0),
        tf.zeros_like(x),
        tf.cast(x > 0, tf.float32),
        tf.reverse(x, [1]),
    ]


def _numbers(x):
    whole = tf.cast(x, tf.int32)
    return [
        tf.reduce_mean(x, [1]),
        tf.reduce_sum(x, 0, keepdims=True),
        tf.reduce_max(x),
        tf.reduce_min(x, [0, 1], keepdims=True),
        tf.reduce_prod(x, -1),
        tf.reduce_any(x > 0, 1),
        tf.reduce_all(x > 0, 0),
        tf.argmax(x, -1, tf.int32),
        tf.argmin(x, 0),
        tf.nn.softmax(x),
        tf.nn.log_softmax(x),
        *tf.math.top_k(x, 3),
        tf.where(x > 0, x, x * 2.0),
        tf.where(x[:1] > 0, x, 1.0),
        tf.where(x > 0),
        tf.one_hot(tf.clip_by_value(whole, 0, 3), 5),
        tf.one_hot(tf.clip_by_value(whole, 0, 3), 5, axis=0),
        tf.range(tf.shape(x)[0], tf.shape(x)[0] * 3, 2),
        tf.cumsum(x, 1),
        tf.cast(whole // 2, tf.float32) + x[:, :1],
        whole % 3,
        tf.math.squared_difference(x, x[0]),
        tf.maximum(x, 0.5) / tf.minimum(x - 9.0, -1.0),
        tf.pow(tf.abs(x), 2.0),
        tf.math.unsorted_segment_sum(x, [0, 2, 1, 0], 3),
        tf.scatter_nd([[1], [3]], x[:2], [6, 6]),
        tf.math.atan2(x, x + 2.0),
        tf.rank(x),
        tf.nn.embedding_lookup(_weights(9, 3), whole[0] % 9),
    ]


PRELU = tf.keras.layers.PReLU(shared_axes=[1, 2])
PRELU.build((None, 12, 10, 4))


def _activations(x):
    return [PRELU(x), tf.nn.gelu(x), tf.nn.relu(x), tf.sign(x)]


FORMS = {
    "convolutions": (_convolutions, IMAGE),
    "joins": (_joins, SEQUENCE),
    "numbers": (_numbers, ROWS),
    "activations": (_activations, IMAGE),
}


@functools.cache
def converted(name):
    """Return the file of a form."""
    body, spec = FORMS[name]
    traced = tf.function(body).get_concrete_function(spec)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([traced])
    return converter.convert()


def _blobs():
    return {
        **{name: functools.partial(converted, name) for name in FORMS},
        **{name: lambda f=f: f().blob for name, f in SAMPLES.items() if name != "flex"},
    }


@pytest.mark.parametrize("name", _blobs())
def test_shapes_are_those_that_the_interpreter_allocates(name):
    """An op that is added to a file, with inputs like these, makes such tensors."""
    blob = _blobs()[name]()
    interpreter = new_interpreter(blob, keep_tensors=True)
    for end in interpreter.get_input_details():
        if (end["shape_signature"] == -1).any():
            shape = [3 if size < 0 else size for size in end["shape_signature"]]
            interpreter.resize_tensor_input(end["index"], shape)
    interpreter.allocate_tensors()
    for end in interpreter.get_input_details():
        drawn = np.random.default_rng(7).normal(size=end["shape"]).astype(end["dtype"])
        interpreter.set_tensor(end["index"], drawn)
    interpreter.invoke()
    graph = tflite.open(blob).graphs[0]
    at = {tensor: i for i, tensor in enumerate(graph.tensors)}
    details = {end["index"]: end["shape"] for end in interpreter.get_tensor_details()}
    arrays = {t: _array(interpreter, i) for t, i in at.items()}
    wrong = []
    for op in graph.ops:
        # The file states the shapes of variables.
        if not op.outputs or op.kind == "READ_VARIABLE":
            continue
        shapes = [None if t is None else tuple(details[at[t]]) for t in op.inputs]
        values = [None if t is None else arrays.get(t) for t in op.inputs]
        for tensor, made in zip(op.outputs, _made(op, shapes, values), strict=True):
            real = tuple(details[at[tensor]])
            fits = len(made.shape) == len(real) and all(
                a in (None, b) for a, b in zip(made.shape, real, strict=True)
            )
            if not fits or (None in made.shape and op.kind != "WHERE"):
                wrong.append((op, made.shape, real))
    assert not wrong
    # The types of results are those of the rules, and shapes that are known.
    tflite.open(blob).verify()


def _made(op, shapes, values):
    """Return the tensors of an op that is added to an empty file, with its inputs."""
    m, ends = tflite.LiteFile(), []
    for i, t in enumerate(op.inputs):
        if t is None:
            ends.append(None)
        elif values[i] is None:
            ends.append(m.add_input(f"t{i}", t.dtype, shapes[i]))
        else:
            ends.append(m.add_constant(f"t{i}", values[i], dtype=t.dtype))
    names = [f"y{i}" for i in range(len(op.outputs))]
    m.add(op.kind, ends, name=names, **op.options)
    return m.graphs[0].ops[0].outputs


def _array(interpreter, place):
    """Return the value of a tensor; None of a variable, and of a branch not taken."""
    try:
        return interpreter.get_tensor(place)
    except ValueError:
        return None


def test_forms_have_the_kinds_that_files_have():
    """The comparison with the interpreter reaches all but a few rules."""
    graphs = (tflite.open(blob()).graphs for blob in _blobs().values())
    kinds = {op.kind for own in graphs for graph in own for op in graph.ops}
    assert len(kinds) > 85


def free():
    m = tflite.LiteFile()
    return m, m.add_input("x", "float32", [None, 5, 8])


def test_free_sizes_stay_free():
    m, x = free()
    target = m.add_constant("to", np.array([-1, 40], np.int32))
    assert m.add("RESHAPE", [x, target], name="y").shape == (None, 40)


def test_custom_ops_have_no_rule():
    m, x = free()
    with pytest.raises(TFLiteError, match="no rule of the kind Mine tells the shape"):
        m.add("Mine", [x], custom_options=b"")


def test_inputs_that_do_not_fit_are_refused():
    m, x = free()
    other = m.add_input("z", "float32", [3, 8])
    with pytest.raises(TFLiteError, match=r"ADD -> 'y'.*\[\?, 5, 8\] and \[3, 8\] do"):
        m.add("ADD", [x, other], name="y")


def test_sizes_that_end_behind_their_tensor_are_refused():
    m = tflite.LiteFile()
    x = m.add_input("x", "float32", [4])
    begin, size = (
        m.add_constant(name, np.array([value], np.int32))
        for name, value in (("b", 2), ("s", 3))
    )
    with pytest.raises(TFLiteError, match="ends behind the size 4"):
        m.add("SLICE", [x, begin, size], name="y")
