"""Inputs that ops join in one range, of which some get few steps of it."""

import functools

import numpy as np
import tensorflow as tf

from geutil import report
from geutil.quantize import calibrate, compare_int8, quantize, to_int8
from tests.quantize.converted import decibels, opened, samples, spec
from tests.quantize.small_networks import normal
from tests.settings import needs_eager

pytestmark = needs_eager

IMAGE = spec(4, 8, 8, 4, name="image")
TO_BOX, TO_SCORE = normal(1, 1, 4, 4, seed=1) / 4, normal(1, 1, 4, 6, seed=2) / 4


def head(image, end):
    boxes = tf.sigmoid(tf.nn.conv2d(image, TO_BOX, 1, "SAME")) * 640.0
    scores = tf.sigmoid(tf.nn.conv2d(image, TO_SCORE, 1, "SAME"), name="scores")
    return end(tf.reshape(boxes, [4, 64, 4]), tf.reshape(scores, [4, 64, 6]))


def joined(boxes, scores):
    return tf.concat([boxes, scores], -1, name="head")


def nested(boxes, scores):
    both = tf.concat([scores, scores[..., :2]], -1)
    return joined(joined(boxes[..., :2], boxes[..., 2:]), both)


NARROW = {
    "concat": (joined, ["Reshape_1"]),
    "concat in the middle": (lambda b, s: tf.nn.relu(joined(b, s)), ["Reshape_1"]),
    "moved": (lambda b, s: tf.transpose(joined(b, s), [0, 2, 1]), ["Reshape_1"]),
    "nested": (nested, ["concat"]),
    "stack": (lambda b, s: tf.stack([b, s[..., :4]], 1), ["strided_slice"]),
    "maximum": (lambda b, s: tf.maximum(b, s[..., :4]), ["strided_slice"]),
    "minimum": (lambda b, s: tf.minimum(b, (s * s)[..., :4]), ["strided_slice"]),
    "minimum, in its own range": (lambda b, s: tf.minimum(b, s[..., :4]), []),
    "choice": (lambda b, s: tf.where(b > 300.0, b, s[..., :4]), ["strided_slice"]),
    "constant": (lambda b, s: tf.concat([tf.zeros_like(b) + normal(4), b], 2), None),
    "two outputs": (lambda b, s: {"boxes": b, "scores": s}, []),
    "alike": (lambda b, s: tf.concat([b, b * 0.5], -1), []),
    "small alike": (lambda b, s: tf.concat([s, s * 0.5], -1), []),
    "zeros": (lambda b, s: tf.concat([b, s * 0.0], -1), []),
    "a number": (lambda b, s: tf.maximum(b, 1.5), []),
}


def calibrated(end, **choices):
    m = opened(lambda image: head(image, end), IMAGE)
    data = samples(m.inputs)
    quantize(m, is_training=False, **choices)
    return m, data, calibrate(m, data)


def test_narrow_inputs_are_named(caplog):
    wrong = {}
    for name, (end, expected) in NARROW.items():
        caplog.clear()
        _, _, ranges = calibrated(end)
        found = [entry.input for entry in ranges.narrow]
        right = len(found) == 1 if expected is None else found == expected
        told = [line for line in caplog.messages if "of 255 steps" in line]
        remedies = all("'skip'" in x and "output of its own" in x for x in told)
        told_too = [line for line in str(ranges).splitlines() if "too narrow" in line]
        if not right or not remedies or not len(found) == len(told) == len(told_too):
            wrong[name] = ranges.narrow, told
    assert wrong == {}
    assert calibrated(joined, scheme="int16x8")[2].narrow == ()


@functools.cache
def in_one_range():
    m, data, ranges = calibrated(joined)
    blob = to_int8(m)
    return m, data, ranges, compare_int8(m, blob, data, layers=True)


def test_steps_are_those_of_the_values():
    m, data, ranges, _ = in_one_range()
    (entry,) = ranges.narrow
    (name,) = [name for name in ranges.ranges if name.endswith("concat_quant")]
    low, high = ranges.ranges[name]
    exact = opened(lambda image: {"y": head(image, joined)}, IMAGE).run(data)["y"]
    scores = exact[..., 4:]
    assert np.isclose(entry.steps, scores.max() / ((high - low) / 255), rtol=1e-5)
    assert (entry.op, entry.op_type, entry.of) == ("head", "ConcatV2", 255)


def test_parts_of_an_output_are_judged_apart():
    m, data, _, comparison = in_one_range()
    (output,) = comparison.outputs
    boxes, scores = output.parts
    simulated = next(iter(m.run(data).values()))
    assert (scores.output, scores.width) == ("Reshape_1", 0.0)
    assert np.isclose(boxes.width, simulated.max() / output.step)
    both = np.sum([np.pad(p.counts, (0, 9 - len(p.counts))) for p in output.parts], 0)
    assert both.tolist() == np.pad(output.counts, (0, 9 - len(output.counts))).tolist()
    assert "0 step(s) wide" in str(comparison)
    assert comparison.agreement == min(p.agreement for p in (output, boxes, scores))


def test_noise_is_told_of_each_part():
    m, data, _, comparison = in_one_range()
    (concat,) = [layer for layer in comparison.layers if layer.op == "head"]
    exact = opened(lambda image: {"y": head(image, joined)}, IMAGE).run(data)["y"]
    simulated = next(iter(m.run(data).values()))
    boxes, scores = concat.parts
    for part, place in ((boxes, np.s_[..., :4]), (scores, np.s_[..., 4:])):
        signal = np.sum(exact[place].astype(float) ** 2)
        noise = np.sum((simulated[place].astype(float) - exact[place]) ** 2)
        assert np.isclose(part.accumulated, 10 * np.log10(signal / noise), atol=0.2)
    assert concat.worst is scores
    assert scores.own < 1.0 < 30.0 < concat.own
    assert "adds most noise: 0.0 dB" in str(comparison)
    report.view(m, report=comparison)


def test_the_remedies_help():
    """Boxes and scores in ranges of their own have as many bits each."""
    exact = opened(lambda image: {"y": head(image, joined)}, IMAGE).run(data_of())["y"]
    two = calibrated(lambda b, s: {"boxes": b, "scores": s})
    left = calibrated(joined, overrides={"head": "skip"})
    found = two[0].run(two[1])["scores"], next(iter(left[0].run(left[1]).values()))
    for scores in (found[0], found[1][..., 4:]):
        assert decibels(exact[..., 4:], scores) > 25
    comparison = compare_int8(left[0], to_int8(left[0]), left[1])
    assert comparison.most <= 2


def data_of():
    return samples({"image": tf.zeros(IMAGE.shape)})


def test_the_remedy_names_all_that_share_the_range():
    def heads(boxes, scores):
        parts = [joined(boxes, scores * factor) for factor in (1.0, 0.5)]
        return tf.concat(parts, 1, name="all")

    _, _, found = calibrated(heads)
    assert len(found.narrow) == 2
    assert all(entry.ops == ("head", "head_1", "all") for entry in found.narrow)
    said = (
        "overrides={'head': 'skip'}, and the same for 'head_1' and 'all', which share"
    )
    assert said in str(found.narrow[0])
    overrides = dict.fromkeys(found.narrow[0].ops, "skip")
    assert calibrated(heads, overrides=overrides)[2].narrow == ()
