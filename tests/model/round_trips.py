"""Running a model, saving it, and running what TensorFlow loads."""

import numpy as np
import tensorflow as tf


def loaded_function(path, signature="serving_default"):
    """Return a function of a SavedModel that gives arrays by name."""
    loaded = tf.saved_model.load(str(path))
    function = loaded.signatures[signature]

    def run(**inputs):
        specs = function.structured_input_signature[1]
        tensors = {n: tf.constant(v, specs[n].dtype) for n, v in inputs.items()}
        assert loaded is not None
        return {name: t.numpy() for name, t in function(**tensors).items()}

    return run


def assert_round_trip(m, folder, inputs, expected):
    """Check what a model computes, before and after it is saved and loaded."""
    assert_same(m.run(**inputs), expected)
    m.save(folder / "round_trip")
    assert_same(loaded_function(folder / "round_trip")(**inputs), expected)


def assert_same(outputs, expected):
    """Check that dictionaries of arrays are equal to the bit."""
    assert sorted(outputs) == sorted(expected)
    for name, value in expected.items():
        value = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
        assert outputs[name].dtype == value.dtype, name
        np.testing.assert_array_equal(outputs[name], value, err_msg=name)
