"""Types of the inputs and outputs of files, by each scheme."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

from geutil import report
from geutil.errors import ArgumentTypeError
from geutil.quantize import compare_int8, to_int8, to_tflite
from tests.interpreter import new_interpreter
from tests.quantize.converted import opened, refused, samples, spec
from tests.quantize.small_networks import normal, prepared
from tests.settings import needs_eager

pytestmark = needs_eager

KERNEL, TABLE = normal(3, 3, 3, 4), normal(7, 4, seed=1)
SPECS = (spec(2, 6, 6, 3, name="image"), spec(2, 3, name="ids", dtype=tf.int32))
TYPES = {
    "int8": ("int8", ["int8", "uint8", "float32"]),
    "int16x8": ("int16", ["int16", "float32"]),
    "weight_only_int8": ("float32", ["float32"]),
}


def network(image, ids):
    x = tf.nn.relu(tf.nn.conv2d(image, KERNEL, 2, "SAME"))
    logits = tf.reduce_mean(x, [1, 2]) + tf.reduce_mean(tf.gather(TABLE, ids), 1)
    # "again" and "image too" are tensors of the file that other ends are, too.
    ends = {"logits": logits, "again": logits, "classes": tf.argmax(logits, 1)}
    return {**ends, "image too": image, "pooled": tf.nn.softmax(logits, name="last")}


@functools.cache
def converted(scheme):
    m = opened(network, *SPECS)
    data = samples(m.inputs)
    by_data = data if TYPES[scheme][0] != "float32" else None
    prepared(m, by_data, scheme=scheme, overrides={"last": "skip"})
    blob = to_tflite(m, scheme=scheme)
    # Values half way between two integers are rounded by whoever rounds them.
    image = new_interpreter(blob).get_signature_runner().get_input_details()["image"]
    data["image"] = _value(_stored(data["image"], image), image)
    return m, data, blob


class Run:
    """A run of a file on data, by TFLite's interpreter alone."""

    def __init__(self, blob, data):
        run = new_interpreter(blob).get_signature_runner()
        self.inputs, self.outputs = run.get_input_details(), run.get_output_details()
        given = {name: _stored(data[name], self.inputs[name]) for name in data}
        self.values = run(**given)

    def types(self):
        ends = {**self.inputs, **self.outputs}
        return {name: np.dtype(end["dtype"]).name for name, end in ends.items()}

    def names(self):
        return [end["name"] for end in (*self.inputs.values(), *self.outputs.values())]

    def value(self, name):
        return _value(self.values[name], self.outputs[name])


def _stored(value, end):
    scale, zero = end["quantization"]
    levels = np.round(value / scale) + zero if scale else value
    return levels.astype(end["dtype"])


def _value(stored, end):
    scale, zero = end["quantization"]
    return np.float32((stored.astype(float) - zero) * scale) if scale else stored


@pytest.mark.parametrize("scheme", TYPES)
def test_each_type_of_each_end(scheme):
    """Values are those of the file without; an unsigned integer is 128 more."""
    m, data, plain = converted(scheme)
    own, types = TYPES[scheme]
    wanted, wrong = Run(plain, data), {}
    before = compare_int8(m, plain, data)
    left = {"ids": "int32", "classes": "int64", "pooled": "float32"}
    for given, made in itertools.product(types, types):
        outputs = {"logits": made, "image too": made}
        blob = to_tflite(m, scheme=scheme, input_type=given, output_type=outputs)
        run, comparison = Run(blob, data), compare_int8(m, blob, data)
        expected = {"image": given, "logits": made, "again": own, "image_too": made}
        same = {
            name: np.allclose(run.value(name), wanted.value(name), 1e-6, 0.0)
            for name in wanted.outputs
        }
        if made == "uint8":
            more = run.values["logits"] - wanted.values["logits"].astype(int)
            same["exactly"] = np.all(more == 128)
        alike = [o.counts for o in comparison.outputs]
        if (
            run.types() != {**expected, **left}
            or not all(same.values())
            or run.names() != wanted.names()
            or alike != [o.counts for o in before.outputs]
        ):
            wrong[given, made] = run.types(), same, run.names(), str(comparison)
    assert wrong == {}


def test_readers_of_files_go_on_working():
    m, data, plain = converted("int8")
    whole = compare_int8(m, plain, data, layers=True)
    for kind in ("uint8", "float32"):
        output_type = dict.fromkeys(["logits", "again"], kind)
        blob = to_int8(m, input_type=kind, output_type=output_type)
        noise = compare_int8(m, blob, data, layers=True)
        assert [e.file_ratio for e in noise.layers] == [
            e.file_ratio for e in whole.layers
        ], kind
        assert (noise.missed, noise.most) == ((), whole.most)
        report.diff(m, blob, report=noise)
        smaller = to_tflite(m, input_type=kind, order="least_memory")
        assert compare_int8(m, smaller, data).most == whole.most


REFUSED = {
    "no such type": ("int8", {"input_type": "int7"}, ["'int7'", "uint8"]),
    "no such input": ("int8", {"input_type": {"x": "int8"}}, ["'x'", "image, ids"]),
    "no such output": ("int8", {"output_type": {"x": "int8"}}, ["'x'", "logits"]),
    "ids": ("int8", {"input_type": {"ids": "uint8"}}, ["'ids'", "int32", "leave it"]),
    "left in float": ("int8", {"output_type": "uint8"}, ["'pooled'", "left in float"]),
    "other bits": ("int8", {"input_type": "int16"}, ["'image'", "int8 or uint8"]),
    "16 bits": ("int16x8", {"input_type": "int8"}, ["'image'", "int16 or float32"]),
    "float": ("weight_only_int8", {"input_type": "int8"}, ["'image'", "in float"]),
}


def test_types_that_an_end_cannot_have():
    for scheme, types, words in REFUSED.values():
        m, _, _ = converted(scheme)
        refused(lambda m=m, s=scheme, t=types: to_tflite(m, scheme=s, **t), *words)
    with pytest.raises(ArgumentTypeError, match="input_type is the name"):
        to_int8(converted("int8")[0], input_type=8)
