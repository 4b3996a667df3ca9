"""Relus as changes of steps, against TFLite's own kernels of Relus."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from geutil.graph.tflite_edits import set_steps
from geutil.graph.tflite_files import ops_of
from geutil.graph.tflite_runtime import new_interpreter, packed, unpacked
from geutil.quantize import calibrate, quantize, to_int8
from geutil.quantize.int8 import converting
from geutil.quantize.int8.standalone_relus import as_changes_of_steps
from tests.quantize.converted import opened, spec
from tests.settings import needs_eager
from tests.thorough import examples

pytestmark = needs_eager

INTEGERS = np.arange(-128, 128, dtype=np.int8).reshape(1, 4, 8, 8)
RELUS = {"RELU": tf.nn.relu, "RELU6": tf.nn.relu6}


@functools.cache
def file_of(function, low=-3.0, high=9.0, *, changed=False):
    """Return the file of a function, by default as TFLite's converter makes it."""
    m = opened(function, spec(1, 4, 8, 8))
    quantize(m, is_training=False)
    data = np.linspace(low, high, INTEGERS.size, dtype=np.float32)
    calibrate(m, [{"a": data.reshape(INTEGERS.shape)}], "min_max", progress=False)
    with pytest.MonkeyPatch.context() as patch:
        if not changed:
            patch.setattr(converting, "as_changes_of_steps", lambda blob: blob)
        return to_int8(m)


def results(blob, delegates):
    run = new_interpreter(blob, delegates=delegates).get_signature_runner()
    (found,) = run(a=INTEGERS).values()
    return found.astype(int)


def kinds(blob):
    return [op.kind for op in ops_of(blob)]


@pytest.mark.parametrize(("kind", "low", "high"), [("RELU", -3, 9), ("RELU6", -1, 4.9)])
def test_every_integer_is_the_relu_of_it(kind, low, high):
    """The steps stay: those of a Relu6 must not reach beyond 6 from 0 on."""
    blob = file_of(RELUS[kind], low, high)
    changed = as_changes_of_steps(blob)
    assert kinds(blob) == [kind]
    assert kinds(changed) == ["QUANTIZE"]
    expected = results(blob, delegates=False)
    assert len(np.unique(expected)) > 50
    np.testing.assert_array_equal(results(changed, delegates=False), expected)
    assert np.abs(results(changed, delegates=True) - expected).max() <= 1


@given(
    st.sampled_from(list(RELUS)),
    st.floats(0.01, 3.0),
    st.floats(0.01, 3.0),
    st.integers(-128, 127),
    st.integers(-128, 127),
)
@examples(200)
def test_files_in_any_steps_compute_the_same(kind, read, made, zero, zero_made):
    """Where it would not be the same, the Relu stays."""
    model = unpacked(file_of(RELUS[kind]))
    (graph,) = model.subgraphs
    set_steps(graph.tensors[graph.inputs[0]], read, zero=zero)
    set_steps(graph.tensors[graph.outputs[0]], made, zero=zero_made)
    blob = packed(model)
    changed = as_changes_of_steps(blob)
    np.testing.assert_array_equal(results(changed, False), results(blob, False))
    cuts_off = zero_made == -128 and (kind == "RELU" or 254.5 * made <= 6)
    assert (changed is not blob) == cuts_off


def test_only_relus_of_their_own_are_changed():
    kernel = np.ones([1, 1, 8, 8], np.float32)

    def function(a):
        fused = tf.nn.relu(tf.nn.conv2d(a, kernel, 1, "SAME"))
        return tf.nn.relu(tf.concat([fused - 1.0, a], 3)), tf.nn.relu(a + a)

    before, after = (kinds(file_of(function, changed=c)) for c in (False, True))
    assert before.count("RELU") == 1
    assert after.count("RELU") == 0
    assert after.count("QUANTIZE") == before.count("QUANTIZE") + 1


def test_float_relus_stay():
    f = tf.function(tf.nn.relu, input_signature=[spec(1, 4, 8, 8)], autograph=False)
    convert = tf.lite.TFLiteConverter.from_concrete_functions
    blob = convert([f.get_concrete_function()], f).convert()
    assert kinds(blob) == ["RELU"]
    assert as_changes_of_steps(blob) is blob
