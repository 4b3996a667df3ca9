import pytest

from geutil import memory, report
from geutil.errors import ArgumentTypeError, MeasurementError
from geutil.memory import Environment, LiveTensor, Measurement, Moment, Timeline


def timeline(*sizes):
    moments = tuple(Moment(f"op{i}", size, "forward") for i, size in enumerate(sizes))
    held = (LiveTensor("op0:0", "MatMul", max(sizes)),) if sizes else ()
    return Timeline(moments, held, 40, 2, "predicted")


def measurement(line):
    environment = Environment(
        **dict.fromkeys(Environment.__dataclass_fields__)  # type: ignore[arg-type]
    )
    return Measurement(7, 8, 9, line, (0.1,), environment)


def lines(page):
    return page.payload["memory"]["timelines"]


def test_a_timeline_in_columns():
    (line,) = lines(report.memory(timeline(1, 5, 3)))
    assert line == {
        "label": "step",
        "source": "predicted",
        "ops": ["op0", "op1", "op2"],
        "bytes": [1, 5, 3],
        "times": [0.0, 0.0, 0.0],
        "phases": [0, 0, 0],
        "held": [{"name": "op0:0", "type": "MatMul", "bytes": 5}],
        "variables": 40,
        "constants": 2,
    }


def test_two_timelines_stand_in_one_page():
    """So do a comparison and a measurement, which is its timeline."""
    before, after = timeline(4, 8), timeline(2, 3, 1)
    page = report.memory(before, after)
    assert [line["label"] for line in lines(page)] == ["plain", "checkpoints"]
    assert [line["bytes"] for line in lines(page)] == [[4, 8], [2, 3, 1]]
    compared = lines(report.memory(memory.compare(before, after)))
    assert [line["label"] for line in compared] == ["before", "after"]
    assert [line["bytes"] for line in compared] == [[4, 8], [2, 3, 1]]
    assert lines(report.memory(measurement(before))) == lines(report.memory(before))
    assert lines(report.memory(measurement(before), after)) == lines(page)


def test_what_is_no_timeline_is_refused():
    with pytest.raises(MeasurementError):
        report.memory(measurement(None))
    for wrong in ("step", 3, [timeline(1)]):
        with pytest.raises(ArgumentTypeError, match=r"geutil\.memory\.predict"):
            report.memory(wrong)
        with pytest.raises(ArgumentTypeError, match=r"geutil\.memory\.predict"):
            report.memory(timeline(1), wrong)
    with pytest.raises(ArgumentTypeError):
        report.memory(None)
