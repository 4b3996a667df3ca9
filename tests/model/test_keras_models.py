"""Models of Keras and of tf_keras, and their files."""

import importlib
import json
import zipfile

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.model import ModelError, inspect

X = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)


@pytest.fixture(params=["keras", "tf_keras"])
def keras(request):
    return importlib.import_module(request.param)


def stateful(keras):
    """Return a model whose layers keep states that it does not list as variables."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    x = inputs = keras.Input(batch_shape=X.shape, name="x")
    x = layers.LSTM(4, stateful=True, return_sequences=True)(x)
    x = layers.GRU(4, stateful=True, name="y")(x)
    return keras.Model(inputs, x)


def small(keras):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    x = inputs = keras.Input([3], name="x")
    x = layers.LayerNormalization()(layers.Dense(4, name="dense")(x))
    return keras.Model(inputs, layers.Dropout(0.5, name="y")(x))


def test_states_between_calls_are_saved(keras, tmp_path):
    net = stateful(keras)
    m = model.open(net)
    states = [v for v in m.variables.values() if v.shape == [2, 4]]
    assert len(states) == 3
    m.save(tmp_path / "m")
    found = [m.run(x=X)["y"] for _ in range(3)]
    for state in states:
        state.assign(tf.zeros_like(state))
    np.testing.assert_array_equal(found, [net(X).numpy() for _ in range(3)])
    assert not np.array_equal(found[0], found[1])
    loaded = tf.saved_model.load(str(tmp_path / "m"))
    call = loaded.signatures["serving_default"]
    np.testing.assert_array_equal(found, [call(x=X)["y"].numpy() for _ in range(3)])
    assert len(loaded.trainable_variables) == 6


def test_what_the_model_does_not_train_is_not_trained(keras):
    net = small(keras)
    net.get_layer("dense").trainable = False
    m = model.open(net)
    trained = m.to_function().trainable_variables
    assert sorted(v.shape.as_list() for v in trained) == [[4], [4]]


def test_files_of_keras(tmp_path):
    net = small(tf.keras)
    x = X[:, 0]
    for suffix in (".h5", ".hdf5", ".keras"):
        file = tmp_path / f"net{suffix}"
        net.save(file)
        np.testing.assert_array_equal(model.open(file).run(x=x)["y"], net(x).numpy())
        found = inspect(file)
        assert (found.kind, found.version) == ("Keras", tf.keras.__version__)
        layers = [layer.type for layer in found.layers]
        assert layers == ["InputLayer", "Dense", "LayerNormalization", "Dropout"]
    assert inspect(tmp_path / "net.h5").bytes_variables == 4 * (3 * 4 + 4 + 4 + 4)


def test_a_file_of_keras_2_says_what_opens_it(tmp_path):
    small(tf.keras).save(tmp_path / "new.keras")
    with (
        zipfile.ZipFile(tmp_path / "new.keras") as new,
        zipfile.ZipFile(tmp_path / "old.keras", "w") as old,
    ):
        for name in new.namelist():
            data = new.read(name)
            if name == "metadata.json":
                data = json.dumps({**json.loads(data), "keras_version": "2.15.0"})
            elif name == "config.json":
                data = data.replace(b'"Functional"', b'"OfKeras2"')
            old.writestr(name, data)
    with pytest.raises(ModelError, match=r"(?s)2\.15\.0 wrote it.*USE_LEGACY_KERAS=1"):
        model.open(tmp_path / "old.keras")


def test_weights_alone_are_no_model(tmp_path):
    small(tf.keras).save_weights(tmp_path / "net.weights.h5")
    with pytest.raises(ModelError, match="weights and no model: make the model"):
        model.open(tmp_path / "net.weights.h5")


def test_code_in_an_hdf5_file_is_not_run(tmp_path):
    ran = []
    x = inputs = tf.keras.Input([5, 3])
    double = tf.keras.layers.Lambda(lambda t: [t * 2, ran.append(1)][0])
    x = tf.keras.layers.TimeDistributed(double)(x)
    tf.keras.Model(inputs, x).save(tmp_path / "net.h5")
    ran.clear()
    with pytest.raises(ModelError, match="holds code of Python"):
        model.open(tmp_path / "net.h5")
    assert not ran


FOREIGN = {
    "net.tflite": (b"\x1c\0\0\0TFL3" + bytes(20), "TFLite file is cut off or damaged"),
    "net": (b"\x89HDF\r\n\x1a\n" + bytes(20), "HDF5.*name it .h5"),
    "net.zip": (b"PK\x03\x04" + bytes(20), "zip archive"),
    "net.onnx": (b"\x08\x07\x12" + bytes(20), "its suffix '.onnx' says no format"),
    "net.h5": (b"no file of this kind", "no whole HDF5 file"),
    "net.bin": (b"", "its suffix '.bin' says no format"),
}


def test_other_files_are_called_what_they_are(tmp_path):
    for name, (data, words) in FOREIGN.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ModelError, match=words):
            model.open(tmp_path / name)


def test_another_backend_is_refused(monkeypatch):
    net = small(tf.keras)
    monkeypatch.setattr("keras.backend.backend", lambda: "jax")
    with pytest.raises(
        ModelError, match=r"computes with jax.*KERAS_BACKEND=tensorflow"
    ):
        model.open(net)


def test_a_size_that_a_layer_needs_and_the_model_leaves_open():
    class Rows(tf.keras.layers.Layer):
        def call(self, x):
            if not tf.is_tensor(x):
                return x
            return sum(x[:, i] for i in range(x.shape[1]))

        def compute_output_shape(self, shape):
            return (shape[0], shape[2])

    image = tf.keras.Input([None, 4], name="image")
    network = tf.keras.Model(image, Rows()(image), name="net")
    with pytest.raises(ModelError, match=r"'net' cannot.*image \(None, None, 4\)") as e:
        model.open(network)
    assert "keras.Input" in str(e.value)
