"""Opens a model in every way it comes, runs it, and saves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from geutil import model
from geutil.errors import GeutilError
from zoo.journeys.visit import Visit
from zoo.results import ERROR, MISSED, OK, REFUSED, Cell
from zoo.subject import Function, Sample
from zoo.values import Values, apart

_WORST = (ERROR, REFUSED, MISSED, OK)


def open_all_ways(visit: Visit) -> Cell:
    """Open each way; the results have to be the same bits."""
    # A `.keras` file is to be what Keras itself reads from it.
    outputs = {".keras": visit.made["keras"]}
    if isinstance(visit.made["frozen"], tuple):
        outputs["frozen"] = visit.made["frozen"][2]
    found = {
        name: _compared(way, visit.sample, outputs.get(name, visit.made["outputs"]))
        for name, way in _ways(visit).items()
    }
    opened = model.open(visit.saved_model)
    for name, (sample, outputs) in visit.made["others"].items():
        other = opened.signatures[name]
        found[name] = _compared(lambda m=other: m, sample, outputs)
    opened.save(visit.place("open"), overwrite=True)
    states = [state for state, _ in found.values()]
    worst = next(state for state in _WORST if state in states)
    good = states.count(OK)
    notes = [f"{name}: {note}" for name, (_, note) in found.items() if note]
    text = f"ok, {good} ways" if worst == OK else f"{good} of {len(found)} ways"
    return Cell(worst, text, "; ".join(notes))


def _ways(visit: Visit) -> dict[str, Callable[[], Any]]:
    ways: dict[str, Callable[[], Any]] = {
        "SavedModel": lambda: model.open(visit.saved_model)
    }
    subject = visit.build()
    if isinstance(subject, Function):
        # What holds the variables stays: a function does not.
        ways["function"] = lambda: model.open(subject.concrete())
        if subject.network is not None:
            ways["Keras model"] = lambda: model.open(subject.network)
    else:
        ways["graph"] = lambda: model.open(
            subject.session.graph,
            session=subject.session,
            inputs={name: f"{name}:0" for name in subject.inputs},
            outputs={name: t.name for name, t in subject.outputs.items()},
        )
    if isinstance(visit.made["keras"], dict):
        ways[".keras"] = lambda: model.open(visit.folder / "model.keras")
    if isinstance(visit.made["frozen"], tuple):
        inputs, outputs, _ = visit.made["frozen"]
        path = visit.folder / "frozen.pb"
        ways["frozen"] = lambda: model.open(path, inputs=inputs, outputs=outputs)
    return ways


def _compared(
    way: Callable[[], Any], sample: Sample, outputs: Values
) -> tuple[str, str]:
    try:
        opened = way()
        difference = apart(opened.run(**_given(opened, sample)), outputs)
    except GeutilError as error:
        return REFUSED, _said(error)
    except Exception as error:  # The cell shows it.
        return ERROR, _said(error)
    if difference:
        return MISSED, f"differs by {difference:.1e} of the range"
    return OK, ""


def _given(opened: Any, sample: Sample) -> Sample:
    """Return the sample by a model's own names: Keras makes some up anew."""
    if set(opened.inputs) == set(sample):
        return sample
    return dict(zip(opened.inputs, sample.values(), strict=True))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def random_ops(found: Any) -> list[str]:
    """Return the random ops of a model, functions included."""
    graphs = [found.graph, *(body.graph for body in found.functions.values())]
    return [
        f"{op.type} '{op.name}'"
        for graph in graphs
        for op in graph.get_operations()
        if "Random" in op.type or op.type in ("Multinomial", "StatelessMultinomial")
    ]
