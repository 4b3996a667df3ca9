"""Timelines and comparisons as numbers and text."""

import math

import pytest

from geutil.errors import ArgumentTypeError, MeasurementError
from geutil.memory import (
    Environment,
    LiveTensor,
    Measurement,
    Moment,
    Timeline,
    compare,
)

MB = 10**6


def timeline_of(*sizes, held=(), source="predicted"):
    """Return a timeline of ops a, b, c and so on with sizes in MB."""
    moments = [Moment(chr(ord("a") + i), size * MB) for i, size in enumerate(sizes)]
    tensors = [LiveTensor(name, "Conv2D", size * MB) for name, size in held]
    return Timeline(tuple(moments), tuple(tensors), 3 * MB, 0, source)


def measurement_of(timeline):
    environment = Environment("2.21", "CPU:0", True, True, False, 1, None)
    return Measurement(None, 9 * MB, None, timeline, (1.0,), environment)


EMPTY = timeline_of()


def test_the_peak_is_the_first_of_the_highest():
    timeline = timeline_of(1, 5, 2, 5)
    assert (timeline.peak, timeline.peak_index) == (5 * MB, 1)
    assert (EMPTY.peak, EMPTY.peak_index) == (0, None)
    assert LiveTensor("block/conv/Relu:0", "Relu", 1).scope == "block/conv"


def test_a_timeline_as_text():
    held = [("block/conv:0", 400), ("x:0", 100)]
    headline = (
        "peak 500 MB at 'b' (predicted; 1 MB = 10^6 bytes), besides variables 3.0 MB "
        "and constants 0 B"
    )
    assert str(timeline_of(100, 500, held=held)).splitlines() == [
        headline,
        "     400 MB  block/conv:0  Conv2D",
        "     100 MB  x:0           Conv2D",
    ]
    # Small tensors are one line.
    held = [(f"t{i}:0", 20 - i) for i in range(13)]
    lines = str(timeline_of(200, held=held)).splitlines()
    assert len(lines) == 12
    assert lines[-1].split() == ["27.0", "MB", "in", "3", "smaller", "ones"]
    assert str(EMPTY).startswith("peak 0 B (predicted;")


def test_a_comparison():
    for before, after, ratio, saved in (
        (timeline_of(8), timeline_of(2), 0.25, 6 * MB),
        (timeline_of(2), timeline_of(8), 4.0, -6 * MB),
        (EMPTY, EMPTY, 1.0, 0),
        (EMPTY, timeline_of(1), math.inf, -MB),
    ):
        comparison = compare(before, after)
        assert (comparison.ratio, comparison.saved) == (ratio, saved)


def test_a_comparison_as_text():
    lines = str(compare(timeline_of(8), timeline_of(2, source="trace"))).splitlines()
    assert lines[0] == "peak 8.0 MB -> 2.0 MB: 0.25 of it, saves 6.0 MB"
    assert lines[1].startswith("before: peak 8.0 MB at 'a' (predicted;")
    assert lines[2].startswith("after: peak 2.0 MB at 'a' (trace;")
    assert "4.00 of it, costs 6.0 MB" in str(compare(timeline_of(2), timeline_of(8)))


def test_measurements_are_compared_by_their_timelines():
    before, after = timeline_of(8), timeline_of(2)
    comparison = compare(measurement_of(before), after)
    assert comparison.before is before
    assert comparison.after is after
    with pytest.raises(MeasurementError, match=r"'after' has no timeline.*the peaks"):
        compare(timeline_of(8), measurement_of(None))
    with pytest.raises(ArgumentTypeError, match="before: expected a Timeline"):
        compare(8, timeline_of(8))


def test_a_measurement_names_its_best_source():
    environment = Environment("2.21", "CPU:0", True, True, False, 1, None)
    peaks = {
        (1, 2, 3): (1, "allocation records of a traced Session"),
        (None, 2, 3): (2, "allocator statistics"),
        (None, None, 3): (3, "resident-set high-water mark"),
        (None, None, None): (0, "nothing"),
    }
    for given, expected in peaks.items():
        measurement = Measurement(*given, None, (1.0,), environment)
        assert (measurement.peak, measurement.source) == expected
