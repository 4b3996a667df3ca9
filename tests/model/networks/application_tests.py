"""What is tested on each Keras application; `test_applications_*.py` share it out."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf

from geutil import model as geutil_model
from tests.model.networks.applications import CLASSES, evaluate


@pytest.mark.usefixtures("as_they_are")
class RoundTrips:
    """The tests; a subclass in a test module has a fixture `network`."""

    def test_a_saved_model_is_opened_and_saved(self, network, fresh, tmp_path):
        m = network.opened
        expected = network.scores
        np.testing.assert_array_equal(m.run(image=network.images)["scores"], expected)
        m.save(tmp_path / "again")
        outputs, variables = fresh.do(
            tmp_path / "again",
            [("run", "serving_default", {"image": network.images}), ("variables",)],
            plain=True,
        )
        assert list(outputs) == ["scores"]
        np.testing.assert_array_equal(outputs["scores"], expected)
        # A tf.Module does not track the seeds of dropout layers.
        assert variables == {
            v.value.name.partition(":")[0]: (list(v.shape), v.trainable)
            for v in network.model.variables
            if "seed_generator" not in v.path
        }

    def test_a_keras_model_is_opened(self, network):
        m = geutil_model.open(network.model)
        (name,), (output,) = m.inputs, m.outputs
        assert output == network.model.output_names[0]
        assert m.inputs[name].shape.as_list() == [None, *network.images.shape[1:]]
        assert list(m.variables) == [v.path for v in network.model.variables]
        for variable in network.model.variables:
            assert m.variables[variable.path] is variable.value
        value = m.run(**{name: network.images})[output]
        np.testing.assert_array_equal(value, evaluate(network.model, network.images))

    def test_head_and_tail_make_the_whole(self, network, fresh, tmp_path):
        m = network.opened
        middle = network.middle_of(m.graph)
        head = m.cut(outputs={"middle": middle})
        tail = m.cut(inputs={"middle": middle})
        assert (list(head.inputs), list(head.outputs)) == (["image"], ["middle"])
        assert (list(tail.inputs), list(tail.outputs)) == (["middle"], ["scores"])
        head.save(tmp_path / "head")
        tail.save(tmp_path / "tail")
        outputs, in_head = fresh.do(
            tmp_path / "head",
            [("run", "serving_default", {"image": network.images}), ("variables",)],
            plain=True,
        )
        scores, in_tail = fresh.do(
            tmp_path / "tail",
            [("run", "serving_default", outputs), ("variables",)],
            plain=True,
        )
        _assert_close(outputs["middle"], evaluate(network.head, network.images))
        np.testing.assert_array_equal(scores["scores"], network.scores)
        # Each part has the variables that Keras' own parts have, and no others.
        assert set(in_head) == _names(network.head)
        assert set(in_tail) == _names(network.tail)

    def test_preprocessing_labels_and_another_middle_are_spliced(
        self, network, fresh, tmp_path
    ):
        m = network.opened
        middle = network.middle_of(m.graph)
        module = _gate(middle)
        merged = m.splice(
            geutil_model.open(module.call), {middle.name: "out"}, {"x": middle.name}
        )
        merged = merged.prepend(geutil_model.open(_preprocessing(network)))
        merged = merged.append(geutil_model.open(_labels()), {"scores": "scores"})
        assert list(merged.inputs) == ["bytes"]
        assert sorted(merged.outputs) == ["doubled", "label"]
        merged.save(tmp_path / "spliced")
        outputs, variables = fresh.do(
            tmp_path / "spliced",
            [("run", "serving_default", {"bytes": network.bytes}), ("variables",)],
            plain=True,
        )

        def by_keras(images):
            hidden = network.head(images, training=False)
            scores = network.tail(tf.nn.relu(hidden) * 0.5 + 0.1, training=False)
            return scores * 2

        images = tf.cast(network.bytes, tf.float32) / 127.5 - 1
        doubled = tf.function(by_keras)(images).numpy()
        _assert_close(outputs["doubled"], doubled)
        np.testing.assert_array_equal(outputs["label"], doubled.argmax(-1))
        # It makes a difference, or the test would show nothing.
        plain = evaluate(network.model, images) * 2
        assert np.abs(plain - doubled).max() > 0.01 * np.abs(doubled).max()
        assert variables["gate"] == ([], True)
        assert set(variables) >= {*_names(network.model), "gate"}


def _assert_close(values, expected):
    """Compare with what Keras computes by other ops, up to rounding."""
    scale = np.abs(expected).max()
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-4 * scale)


def _names(model):
    """Return the variables that inference reads, by the names TensorFlow gives them."""
    names = {v.value.name.partition(":")[0] for v in model.variables}
    # Keras numbers layers by process.
    unread = re.compile(r"(seed_generator|normalization)(_\d+)?/")
    return {name for name in names if not unread.match(name)}


def _gate(middle):
    module = tf.Module()
    module.gate = tf.Variable(0.5, name="gate")
    spec = tf.TensorSpec([None, *middle.shape[1:]], tf.float32, "x")
    module.call = tf.function(
        lambda x: {"out": tf.nn.relu(x) * module.gate + 0.1}, [spec]
    )
    return module


def _preprocessing(network):
    spec = tf.TensorSpec([None, *network.bytes.shape[1:]], tf.uint8, "bytes")
    return tf.function(
        lambda bytes: {"image": tf.cast(bytes, tf.float32) / 127.5 - 1}, [spec]
    )


def _labels():
    spec = tf.TensorSpec([None, CLASSES], tf.float32, "scores")
    return tf.function(
        lambda scores: {
            "label": tf.argmax(scores, -1),
            "doubled": scores * 2,
        },
        [spec],
    )
