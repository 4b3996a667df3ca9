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


def step(*ops, held, variables=0):
    """Return a timeline of ops: name, MB, phase and time; and of tensors: name, MB."""
    moments = tuple(Moment(op, mb * 10**6, phase, time) for op, mb, phase, time in ops)
    tensors = tuple(LiveTensor(name, "Tanh", mb * 10**6) for name, mb in held)
    return Timeline(moments, tensors, variables, 0, "predicted")


PLAIN = step(
    ("net/one/Tanh", 6, "forward", 30.0),
    ("net/two/Tanh", 8, "forward", 20.0),
    ("gradients/net/two/Tanh_grad/TanhGrad", 10, "backward", 50.0),
    held=[
        ("net/one/Tanh:0", 6),
        ("net/two/Tanh:0", 2),
        ("gradients/net/two/Tanh_grad/TanhGrad:0", 2),
    ],
)
SMALLER = step(
    ("net/one/Tanh", 5, "forward", 60.0),
    ("gradients/net/two/Tanh_grad/TanhGrad", 4, "backward", 60.0),
    held=[("net/one/Tanh:0", 4), ("net/two/Tanh:0", 1)],
    variables=7 * 10**6,
)


def answers(page):
    return page.payload["memory"]["answers"]


def test_answers_of_one_step():
    told = answers(report.memory(PLAIN))
    assert told["Peak"][0] == "step: 10.0 MB (predicted)"
    # In 50 of 100 units of time the forward pass is over.
    assert told["Moment"] == ["step: backward, after 50 % of the time, in net/two"]
    assert told["Layers"] == ["step: one 6.0 MB (60 %), two 4.0 MB (40 %)"]
    # 8 of 10 MB are results of the forward pass, 6 of them one tensor.
    first, second = told["Advice"]
    assert first.startswith("Checkpoints: 80 % of the peak are results of the forward")
    assert second.startswith("One tensor of net/one is 60 % of the peak")


def test_answers_of_two_steps():
    told = answers(report.memory(PLAIN, SMALLER))
    assert told["Peak"][:3] == [
        "plain: 10.0 MB (predicted)",
        "checkpoints: 5.0 MB (predicted)",
        "ratio 0.50",
    ]
    assert told["Moment"][1].startswith("checkpoints: forward, after 0 % of the time")
    saved, *others = told["Advice"]
    assert saved == "checkpoints: 5.0 MB less, 20 % more time."
    assert not any(line.startswith("Checkpoints:") for line in others)
    assert others[-1].startswith("Variables hold more than the step")


def test_answers_where_nothing_stands_out():
    even = [("a/x:0", 1), ("b/x:0", 1), ("c/x:0", 1)]
    told = answers(report.memory(step(("a/x", 3, "", 0.0), held=even)))
    assert told["Moment"] == ["step: after 0 % of the ops, in a"]
    assert told["Advice"] == ["No single cause: a smaller batch lowers all of it."]


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
