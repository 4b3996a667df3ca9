"""The characters of `benchmarks.glyphs`, and the networks that read them."""

import json

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import glyphs
from benchmarks.glyphs import drawing, networks
from tests.processes import ROOT
from tests.settings import slow

pytestmark = slow
FOLDER = ROOT / "benchmarks" / "glyphs"
TRAINED = json.loads((FOLDER / "trained.json").read_text())
SEED = 7_000_000
"""Of no image that anything was trained or measured on."""
FEW = 20


@pytest.fixture(scope="module")
def fresh():
    return glyphs.images(1000, SEED)


def test_there_are_figures_and_letters_of_every_face():
    drawn = drawing.drawings()
    assert len(glyphs.CHARACTERS) == len(set(glyphs.CHARACTERS)) == 62
    assert drawn.shape == (len(drawing.FACES), 62, 64, 64)
    assert drawn.min() == 0
    assert drawn.max() == 1
    # Each holds ink, none reaches the edge, and no two of a face are the same.
    ink = drawn.mean((2, 3))
    assert ink.min() > 0.01
    assert ink.max() < 0.3
    assert not drawn[:, :, [0, -1]].any()
    assert not drawn[..., [0, -1]].any()
    for face in drawn:
        assert len({each.tobytes() for each in face}) == 62


def test_a_letter_looks_like_itself():
    """An I is a column, an o has a hole, a d stands taller on its right side."""
    face = drawing.drawings()[drawing.FACES.index("DejaVuSans")]
    by_name = dict(zip(glyphs.CHARACTERS, face > 0.5, strict=True))
    columns = np.flatnonzero(by_name["I"].any(0))
    assert len(columns) < 8
    rows, columns = (np.flatnonzero(by_name["o"].any(axis)) for axis in (1, 0))
    middle = by_name["o"][rows[len(rows) // 2]]
    assert middle[columns[0] : columns[-1] + 1].mean() < 0.6
    assert not middle[columns[len(columns) // 2]]
    d = by_name["d"]
    assert d[:, 32:].any(1).sum() > 1.2 * d[:, :31].any(1).sum()


def test_the_same_seed_gives_the_same_images():
    first, again, other = (glyphs.images(FEW, seed) for seed in (3, 3, 4))
    for a, b in zip(first, again, strict=True):
        assert a.tobytes() == b.tobytes()
    assert first[0].tobytes() != other[0].tobytes()


def test_shapes_and_ranges(fresh):
    x, y = fresh
    assert (x.shape, x.dtype) == ((1000, 32, 32, 3), np.float32)
    assert (y.shape, y.dtype) == ((1000,), np.int64)
    assert -1 <= x.min() < -0.95 < 0.95 < x.max() <= 1
    assert set(y) == set(range(62))
    # Light on dark and dark on light.
    corner, middle = x[:, :3].mean((1, 2, 3)), np.abs(x[:, 10:22, 10:22]).mean()
    assert (corner < 0).mean() == pytest.approx(0.5, abs=0.1)
    assert middle > 0.2


def test_without_strength_nothing_is_moved():
    x, y = glyphs.drawing.images(FEW, 5, strength=0.0)
    again, _ = glyphs.drawing.images(FEW, 5)
    assert np.abs(x - again).max() > 0.1
    assert len(y) == FEW


def test_weights_are_small():
    sizes = [(FOLDER / f"{name}.npz").stat().st_size for name in networks.NETWORKS]
    assert sum(sizes) <= 3e6
    for name in networks.NETWORKS:
        with np.load(FOLDER / f"{name}.npz") as kept:
            assert {value.dtype for value in kept.values()} == {np.dtype(np.float16)}


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_networks_are_as_accurate_as_is_said(name, fresh):
    network = getattr(glyphs, name)()
    call = tf.function(lambda x: network(x, training=False))
    found = glyphs.accuracy(call, *fresh)
    assert found == pytest.approx(TRAINED[name]["accuracy"], abs=1.5)
    assert network.count_params() == TRAINED[name]["parameters"]


def test_accuracy_counts():
    logits = np.eye(62, dtype=np.float32)
    labels = np.r_[np.arange(31), np.zeros(31, int)]
    # One of the other half is told as 0, too: the first one is not among them.
    assert glyphs.accuracy(lambda x: x, logits, labels) == 50.0


def test_weights_of_another_network_are_refused():
    with pytest.raises(ValueError, match="another network"):
        networks.load(networks.vit(trained=False), "mobilenet")


def test_the_table_says_what_was_measured():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name, told in TRAINED.items():
        assert f"| `{name}` " in text
        assert f" {told['accuracy']:.2f} % " in text, name
