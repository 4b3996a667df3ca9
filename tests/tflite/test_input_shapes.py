"""Tests of batch sizes and input shapes, against the interpreter's rows."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from geutil import tflite
from geutil.errors import TFLiteError
from tests.interpreter import new_interpreter
from tests.tflite.running import drawn, float_file, run
from tests.tflite_files import SAMPLES

ROWS = 3


def weights(*shape):
    return np.random.default_rng(7).normal(size=shape).astype(np.float32)


@functools.cache
def kernels():
    return weights(3, 3, 3, 8), weights(2, 2, 4, 8), weights(1, 9, 8), weights(72, 5)


def network(x, batch, height):
    """Compute with constants that hold the batch, and sizes of the image."""
    conv, up, token, last = kernels()
    x = tf.nn.relu(tf.nn.conv2d(x, conv, 2, "SAME"))
    up_shape = [batch, height, height, 4]
    y = tf.nn.conv2d_transpose(x, up, up_shape, 2, "SAME")
    y = tf.slice(y, [0, 0, 0, 1], [batch, height, height, 3])[:batch, ::2, ::2]
    x = tf.reshape(x + tf.pad(y, [[0, 0]] * 3 + [[0, 5]]), [batch, -1, 8])
    x = tf.concat([tf.broadcast_to(token, [batch, 9, 8]), x], 1)
    x = tf.transpose(tf.reshape(x, [batch, -1, 4, 2]), [0, 2, 1, 3])
    x = tf.matmul(x, x, transpose_b=True) @ x
    x = tf.reshape(tf.transpose(x, [0, 2, 1, 3]), [batch, -1, 8])
    return tf.reshape(x[:, :9], [batch, 72]) @ last


@functools.cache
def converted(batch, height):
    """Return the file of the network for a batch and a size of images."""

    @tf.function
    def body(x):
        return network(x, batch, height)

    spec = tf.TensorSpec([batch, height, height, 3], name="x")
    return float_file(body, spec)


def outputs_alone(blob, feeds):
    """Return the outputs of a file for each row alone, joined."""
    alone = [run(blob, *(f[i : i + 1] for f in feeds)) for i in range(ROWS)]
    return [np.concatenate(rows) for rows in zip(*alone, strict=True)]


def test_constants_follow_the_batch():
    """The file gives what one converted for that batch gives."""
    file = tflite.open(converted(1, 8))
    file.set_batch_size(ROWS)
    (x,) = feeds = drawn(file.to_bytes(), ROWS)
    assert x.shape[0] == ROWS
    (made,), (wanted,) = run(file.to_bytes(), x), run(converted(ROWS, 8), x)
    np.testing.assert_array_equal(made, wanted)
    np.testing.assert_allclose(outputs_alone(converted(1, 8), feeds)[0], made, 1e-5)


def test_shapes_are_those_of_a_file_converted_for_the_batch():
    file, wanted = tflite.open(converted(1, 8)), tflite.open(converted(ROWS, 8))
    file.set_batch_size(ROWS)
    ends = [op.outputs[0].shape for op in file.graphs[0].ops]
    assert ends == [op.outputs[0].shape for op in wanted.graphs[0].ops]


def test_a_batch_is_made_smaller():
    file = tflite.open(converted(ROWS, 8))
    with pytest.raises(TFLiteError, match=r"BROADCAST_TO|rows for the batch|CONCAT"):
        # The class token of each row is a constant, whose rows could differ.
        tflite.open(_with_other_rows(converted(ROWS, 8))).set_batch_size(1)
    file.set_batch_size(1)
    (x,) = drawn(file.to_bytes(), 1)
    np.testing.assert_array_equal(
        run(file.to_bytes(), x)[0], run(converted(1, 8), x)[0]
    )


def _with_other_rows(blob):
    file = tflite.open(blob)
    token = next(t for t in file.graphs[0].tensors if t.shape == (ROWS, 9, 8))
    value = np.array(token.value)
    value[1] += 1
    token.value = value
    return file.to_bytes()


@pytest.mark.parametrize("name", ["attention", "mixed", "int8", "dynamic_range"])
def test_rows_of_a_batch_are_those_of_single_runs(name):
    blob = SAMPLES[name]().blob
    file = tflite.open(blob)
    file.set_batch_size(ROWS)
    new = file.to_bytes()
    feeds = drawn(new, ROWS)
    assert all(end.shape[0] == ROWS for end in file.graphs[0].outputs)
    for made, wanted in zip(run(new, *feeds), outputs_alone(blob, feeds), strict=True):
        np.testing.assert_allclose(made, wanted, 1e-5)


@pytest.mark.parametrize("name", ["attention", "mixed"])
def test_a_free_batch_can_be_resized(name):
    """A file of one row is resized by the interpreter once its batch is free."""
    blob = SAMPLES[name]().blob
    file = tflite.open(blob)
    file.set_batch_size(None)
    assert all(end.shape[0] is None for end in file.graphs[0].outputs)
    feeds = drawn(blob, ROWS)
    made = run(file.to_bytes(), *feeds)
    for one, wanted in zip(made, outputs_alone(blob, feeds), strict=True):
        np.testing.assert_allclose(one, wanted, 1e-5)


def test_variables_keep_a_state_for_each_row():
    """Two steps of a streaming network give the rows that single ones give."""
    file = tflite.open(streaming())
    file.set_batch_size(ROWS)
    steps = [weights(ROWS, 2, 4) for _ in range(2)]
    np.testing.assert_array_equal(
        _steps(file.to_bytes(), steps),
        np.concatenate(
            [_steps(streaming(), [s[i : i + 1] for s in steps]) for i in range(ROWS)], 1
        ),
    )


def _steps(blob, steps):
    interpreter = new_interpreter(blob)
    interpreter.allocate_tensors()
    (taken,), (given,) = (
        interpreter.get_input_details(),
        interpreter.get_output_details(),
    )
    made = []
    for value in steps:
        interpreter.set_tensor(taken["index"], value)
        interpreter.invoke()
        made.append(interpreter.get_tensor(given["index"]))
    return np.stack(made)


@functools.cache
def streaming():
    """Return a file that joins each input to the one before."""

    class Streaming(tf.Module):
        def __init__(self):
            super().__init__()
            self.state = tf.Variable(tf.zeros([1, 2, 4]), name="state")

        @tf.function(input_signature=[tf.TensorSpec([1, 2, 4], name="x")])
        def __call__(self, x):
            both = tf.concat([self.state, x], 1)
            self.state.assign(both[:, 2:])
            return tf.nn.relu(both)

    module = Streaming()
    traced = module.__call__.get_concrete_function()
    converter = tf.lite.TFLiteConverter.from_concrete_functions([traced], module)
    converter.experimental_enable_resource_variables = True
    return converter.convert()


def test_the_shape_of_an_image_is_followed():
    """The file gives what one converted for that size gives."""
    file = tflite.open(images(None))
    file.set_input_shape("x", [1, 12, 16, 3])
    (x,) = drawn(file.to_bytes(), 1)
    assert x.shape == (1, 12, 16, 3)
    np.testing.assert_array_equal(
        run(file.to_bytes(), x)[0], run(images(None, (12, 16)), x)[0]
    )


@functools.cache
def images(size, shape=(8, 8)):
    """Return a file that flattens an image, after it is resized if there is a size."""
    conv = kernels()[0]

    @tf.function
    def body(x):
        x = tf.nn.conv2d(x, conv, 2, "SAME")
        x = x if size is None else tf.image.resize(x, size)
        return tf.reshape(x, [1, x.shape[1] * x.shape[2], 8])

    traced = body.get_concrete_function(tf.TensorSpec([1, *shape, 3], name="x"))
    return tf.lite.TFLiteConverter.from_concrete_functions([traced]).convert()


@pytest.mark.parametrize(("resize", "size"), [("scale", (16, 24)), ("keep", (8, 8))])
def test_sizes_that_images_are_resized_to_are_scaled_or_kept(resize, size):
    file = tflite.open(images((8, 8)))
    file.set_input_shape("x", (1, 16, 24, 3), resize=resize)
    (x,) = drawn(file.to_bytes(), 1)
    np.testing.assert_array_equal(
        run(file.to_bytes(), x)[0], run(images(size, (16, 24)), x)[0]
    )


def _transposed(x):
    return tf.reshape(tf.transpose(x, [1, 0, 2]), [5, 1, 4])


def _mean_of_rows(x):
    return tf.reduce_mean(x, 0)


def _first_row(x):
    return x[0]


def _half(x):
    return tf.reverse(x, [0])


REFUSED = {
    "moved": (_transposed, (1, 5, 4), "move the batch or merge it"),
    "mean": (_mean_of_rows, (2, 5, 4), "computes along the batch"),
    "first": (_first_row, (2, 5, 4), "part of the batch"),
    "reversed": (_half, (2, 5, 4), "rows depend on each other"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_ambiguous_files_are_refused_and_left_alone(name):
    body, shape, message = REFUSED[name]
    traced = tf.function(body).get_concrete_function(tf.TensorSpec(shape, name="x"))
    blob = tf.lite.TFLiteConverter.from_concrete_functions([traced]).convert()
    file = tflite.open(blob)
    before = file.to_bytes()
    with pytest.raises(TFLiteError, match=message):
        file.set_batch_size(7)
    assert file.to_bytes() == before


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda file: file.set_input_shape("image", [2, 2]), "the rank stays"),
        (
            lambda file: file.set_input_shape("imag", [2, 2]),
            "has no tensor 'imag'; near it are",
        ),
        (lambda file: file.set_batch_size(0), "at least one row"),
        (lambda file: file.set_batch_size(2**31), "at least one row"),
    ],
)
def test_shapes_that_cannot_be_are_refused(edit, message):
    file = tflite.open(SAMPLES["attention"]().blob)
    with pytest.raises(TFLiteError, match=message):
        edit(file)


@pytest.mark.parametrize("graph", [1, 4], ids=["branch", "body"])
def test_ends_of_subgraphs_that_are_called_keep_their_shapes(graph):
    file = tflite.open(SAMPLES["flow"]().blob)
    before = file.to_bytes()
    with pytest.raises(TFLiteError, match=r"another shape: .* is called by <LiteOp"):
        file.set_batch_size(2, graph=graph)
    assert file.to_bytes() == before


def test_weights_that_do_not_fit_are_named():
    def body(x):
        return tf.reshape(tf.nn.relu(x), [1, 32]) @ weights(32, 2)

    spec = tf.TensorSpec([1, 2, 2, 8], name="x")
    traced = tf.function(body).get_concrete_function(spec)
    file = tflite.open(
        tf.lite.TFLiteConverter.from_concrete_functions([traced]).convert()
    )
    with pytest.raises(TFLiteError, match=r"FULLY_CONNECTED .* \(1, 32\) as one row"):
        file.set_input_shape("x", [1, 4, 2, 8])


def test_a_resize_must_be_told():
    file = tflite.open(images((8, 8)))
    with pytest.raises(TFLiteError, match='pass resize="scale"'):
        file.set_input_shape("x", (1, 16, 24, 3))


def test_files_with_planned_memory_are_refused():
    file = tflite.open(images(None))
    file.metadata["OfflineMemoryAllocation"] = next(iter(file.metadata.values()))
    with pytest.raises(TFLiteError, match=r"strip\(metadata=\['OfflineM"):
        file.set_batch_size(2)


@pytest.mark.parametrize("kind", ["RNN", "UNIDIRECTIONAL_SEQUENCE_RNN"])
def test_states_of_recurrent_ops_have_a_row_for_each(kind):
    """States that an op keeps grow with the batch; rows are those of single runs."""
    file = tflite.LiteFile()
    steps = () if kind == "RNN" else (4,)
    x = file.add_input("x", "float32", [1, *steps, 3])
    arrays = {"w": weights(5, 3), "r": weights(5, 5), "b": weights(5)}
    values = [file.add_constant(name, value) for name, value in arrays.items()]
    state = tflite.LiteTensor("state", "float32", [1, 5])
    state.is_variable = True
    file.graphs[0].add_tensor(state)
    made = file.add(kind, [x, *values, state], fused_activation_function="TANH")
    file.set_outputs([made])
    blob = file.to_bytes()
    assert made.shape == (1, *steps, 5)
    file.set_batch_size(ROWS)
    assert state.shape == (ROWS, 5)
    feeds = [weights(ROWS, *steps, 3)]
    (result,) = run(file.to_bytes(), *feeds)
    np.testing.assert_allclose(result, outputs_alone(blob, feeds)[0], 1e-5)
