"""Pictures: files that other programs can read, with the right words in them."""

import itertools
import re
import struct
import sys
import xml.etree.ElementTree as ElementTree

import matplotlib as mpl
import pytest

from geutil.errors import MissingExtraError, PlotError
from geutil.memory import LiveTensor, Moment, Timeline, compare

MB = 10**6
SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(count, source="predicted", name="block"):
    """Return a timeline whose peak, of 2 MB for each op, is in the middle."""
    rising = [2 * MB * (i + 1) for i in range(count)]
    sizes = rising + rising[-2::-1]
    moments = tuple(Moment(f"{name}/op_{i}", size) for i, size in enumerate(sizes))
    held = tuple(LiveTensor(f"{name}/op_{i}:0", "Relu", 2 * MB) for i in range(count))
    return Timeline(moments, held, 30 * MB, MB // 2, source)


def words(path):
    """Return the texts of an SVG, in order."""
    root = ElementTree.parse(path).getroot()
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]


def test_files_of_each_kind(tmp_path):
    before = dict(mpl.rcParams)
    path = timeline_of(5).plot(tmp_path / "step.png")
    assert path == tmp_path / "step.png"
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", header[16:]) == (1800, 750)
    assert timeline_of(5).plot(str(tmp_path / "step.PDF")).read_bytes()[:5] == b"%PDF-"
    # Nobody else notices.
    assert dict(mpl.rcParams) == before


def test_the_words_of_a_timeline(tmp_path):
    texts = words(timeline_of(5).plot(tmp_path / "step.svg"))
    assert "peak 10.0 MB" in texts
    assert "in 'block/op_4'" in texts
    assert "besides variables 30.0 MB, constants 500 kB" in texts
    assert "ops in order of execution" in texts
    assert [t for t in texts if t.startswith("block")] == [
        f"block/op_{i}:0" for i in range(5)
    ]
    assert texts.count("2.0 MB") == 5


def test_many_tensors_are_one_row_and_no_rows_overlap(tmp_path):
    path = timeline_of(20).plot(tmp_path / "step.svg")
    texts = words(path)
    assert len([t for t in texts if t.startswith("block")]) == 12
    assert "and 8 smaller ones, together" in texts
    assert "16.0 MB" in texts
    heights = [
        float(re.search(r"[ (]-?[\d.]+[ ,](-?[\d.]+)\)", e.get("transform"))[1])
        for e in ElementTree.parse(path).getroot().iter(f"{SVG}text")
        if e.text and e.text.startswith("block")
    ]
    gaps = [b - a for a, b in itertools.pairwise(heights)]
    # The letters are 8 points high.
    assert len(gaps) == 11
    assert min(gaps) > 8 * 1.2


def test_a_long_name_shows_both_its_ends_and_is_no_formula(tmp_path):
    name = "a$_b$_" + "x" * 100
    texts = words(timeline_of(1, name=name).plot(tmp_path / "step.svg"))
    (shown,) = [t for t in texts if t.startswith("a$_b$_")]
    assert shown.endswith("x/op_0:0")
    assert len(shown) == 50


def test_the_words_of_a_comparison(tmp_path):
    before, after = timeline_of(9, "trace", "old"), timeline_of(3, name="new")
    texts = words(compare(before, after).plot(tmp_path / "both.svg"))
    assert {"peak 18.0 MB", "peak 6.0 MB"} <= set(texts)
    assert {"before (trace)", "after (predicted)"} <= set(texts)
    assert {"before: held at the peak", "after: held at the peak"} <= set(texts)
    assert {"old/op_8:0", "new/op_2:0"} <= set(texts)
    assert "ops in order of execution, %" in texts


def test_the_peak_of_many_ops_is_drawn(tmp_path):
    sizes = [MB] * 50_000
    sizes[10_000], sizes[31_415] = 5 * MB, 9 * MB
    moments = tuple(Moment(f"op_{i}", size) for i, size in enumerate(sizes))
    path = Timeline(moments, (), 0, 0, "predicted").plot(tmp_path / "step.svg")
    # A line of the file for each of 50,000 ops would be slow to draw.
    assert len(path.read_text().splitlines()) < 25_000
    paths = ElementTree.parse(path).getroot().iter(f"{SVG}path")
    (curve,) = (e.get("d") for e in paths if e.get("clip-path"))
    drawn = [tuple(map(float, p)) for p in re.findall(r"([\d.]+) ([\d.]+)", curve)]
    left, right = drawn[0][0], drawn[-1][0]
    # Coordinates fall as bytes rise.
    top = min(y for _, y in drawn)
    lowest = max(y for _, y in drawn)
    (middle,) = {y for _, y in drawn} - {top, lowest}
    assert (lowest - top) / (lowest - middle) == pytest.approx(8 / 4, rel=1e-3)
    for level, op in ((middle, 10_000), (top, 31_415)):
        for x in (x for x, y in drawn if y == level):
            share = (x - left) / (right - left)
            assert share == pytest.approx(op / 50_000, abs=1 / 2000)


def test_nothing_to_draw(tmp_path):
    for moments in ((), (Moment("a", 0),)):
        timeline = Timeline(moments, (), 0, 0, "predicted")
        for drawn in (timeline, compare(timeline, timeline)):
            assert drawn.plot(tmp_path / "step.svg").stat().st_size > 0


def test_other_formats_and_a_missing_extra_are_refused(tmp_path, monkeypatch):
    for name in ("step", "step.txt", "step.jpg"):
        with pytest.raises(PlotError, match=r"name a file in \.png, \.svg, \.pdf"):
            timeline_of(3).plot(tmp_path / name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install geutil\[plot\]"):
        timeline_of(3).plot(tmp_path / "step.png")
    assert not list(tmp_path.iterdir())
