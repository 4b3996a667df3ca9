"""What the benchmark of quantized files measures, and how its processes talk."""

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.quantized import __main__ as table
from benchmarks.quantized import networks, peers, ptq, schemes
from benchmarks.quantized.judging import Judgement, Runner, decibels, judge
from benchmarks.quantized.made import attempt, read_all, write_all
from benchmarks.quantized.networks import Subject
from tests.settings import slow
from tests.thorough import thorough

pytestmark = slow


@pytest.fixture(scope="module")
def subject():
    tf.keras.utils.set_random_seed(0)
    layers = tf.keras.layers
    x = image = layers.Input([8, 8, 3], name="image")
    x = layers.Conv2D(8, 3, use_bias=False)(x)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.Dense(62)(layers.GlobalAveragePooling2D()(x))
    images = np.random.default_rng(0).uniform(-1, 1, [24, 8, 8, 3])
    images = images.astype(np.float32)
    network = tf.keras.Model(image, x)
    labels = network(images, training=False).numpy().argmax(-1)
    return Subject("tiny", network, images[:8], images[8:], (images, labels))


def test_decibels_are_ten_times_the_logarithm():
    exact = np.random.default_rng(0).normal(3.0, 2.0, [1000, 10])
    noise = np.resize([0.02, -0.02], exact.shape)
    assert decibels(exact + noise, exact) == pytest.approx(40.0, abs=0.5)
    assert decibels(exact, exact) == np.inf


@pytest.mark.parametrize("name", ["int8, mse", "4/8, nearest"])
def test_schemes_make_files_that_are_judged(subject, name):
    found = judge(table._ours(subject, name), subject, subject(subject.judged))
    bits = 8 if name.startswith("int8") else 4
    assert 6 * (bits - 4) + 8 < found.decibels < 6 * bits + 3
    assert found.accuracy > 70
    assert found.milliseconds > 0


def test_a_file_in_float_is_as_exact_as_floats_are(subject, tmp_path):
    peers.save(subject.network, tmp_path)
    blob = ptq.converted(str(tmp_path), subject.calibration, ptq.SCHEMES["float"])
    runner = Runner(blob, delegates=False)
    assert decibels(runner(subject.judged), subject(subject.judged)) > 100
    assert len(runner.seconds) == len(subject.judged)


def test_what_comes_of_schemes_is_handed_over(tmp_path):
    def fail():
        raise KeyError("no such op\nand more")

    schemes = {"4/8, best": lambda: b"file", "16x8, min-max": fail}
    write_all(schemes, tmp_path)
    assert read_all(tmp_path) == {name: attempt(s) for name, s in schemes.items()}
    assert attempt(fail).error.startswith("KeyError: 'no such op")
    assert attempt(schemes["4/8, best"]).blob == b"file"


def row(network, scheme, by, decibels):
    judgement = None if decibels is None else Judgement(decibels, None, 1, 1.0, True)
    return table.QuantizedRow(network, scheme, by, judgement)


def test_the_default_is_held_against_the_best_peer():
    found = [
        row("a", "int8, best", "geutil", 30.0),
        row("a", "int8, mse", "geutil", 33.0),
        row("a", "int8, OCTAV", "LiteRT quantizer", 28.0),
        row("a", "int8", "TFLite", 29.5),
        row("b", "int8, best", "geutil", 10.0),
        row("b", "int8", "TFLite", 11.0),
        row("b", "4/8, best", "geutil", None),
        row("b", "4/8, MSE", "LiteRT quantizer", 5.0),
    ]
    _, _, *lines = table.summary(found)
    assert lines == ["| int8 | +0.5 | -1.0 | -0.2 |"]


def test_rows_are_told(capsys):
    table.show(
        [
            row("a", "4/8, best", "geutil", 12.0),
            table.QuantizedRow("a", "int8", "TFLite", None, error="it failed"),
            row("a", "int8, best", "geutil", 30.0),
        ]
    )
    lines = capsys.readouterr().out.splitlines()
    int8, four = (lines.index(line) for line in lines if "best" in line)
    assert int8 < four
    assert lines[-1] == "int8 by TFLite: it failed"


def test_networks_at_random_have_signals():
    images = np.random.default_rng(0).uniform(-1, 1, [4, 32, 32, 3])
    network = networks.at_random("MobileNetV2", images.astype(np.float32))
    found = network(images.astype(np.float32), training=False).numpy()
    # They differ from image to image, and by more than rounding.
    assert found.std(0).mean() > 0.05 * found.std()
    assert np.isfinite(found).all()


def test_every_family_of_ours_is_in_the_table():
    assert {name.partition(", ")[0] for name in schemes.SCHEMES} <= {*table.FAMILIES}


@thorough
def test_tflite_makes_its_files(subject, tmp_path):
    made = peers.made_by_peers(subject, tmp_path / "no_such_python")
    assert {by for _, by in made} == {"TFLite"}
    exact = subject(subject.judged)
    found = {
        scheme: judge(each.blob, subject, exact).decibels
        for (scheme, _), each in made.items()
    }
    assert found["float"] > 100
    assert found["16x8"] > found["int8"] > 20
    assert found["float16"] > 50
