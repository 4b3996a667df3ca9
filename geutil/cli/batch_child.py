"""The process of one model of a batch: `python -m geutil.cli.batch_child FOLDER`.

With `--serve` and a listening socket, the server that forks such processes.

The folder holds a `geutil.jobs.model_job.Job`. Each step is noted there
when it ends, so that the death of this process shows where it was.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geutil.errors import spoken_with
from geutil.formats import is_tflite_file
from geutil.jobs import model_job as jobs
from geutil.jobs.batch_inputs import DataSource, PipelineStep
from geutil.jobs.batch_report import write_json
from geutil.jobs.model_job import SERVE, serve

if TYPE_CHECKING:
    from geutil.model import Model

_DRAWN = 8
"""Batches that are drawn."""
_DRAWN_WARNING = (
    "warning: its ranges are those of random inputs, and say nothing of real ones"
)
_NO_DATA = "warning: without data, ranges of activations are as they were initialized"
_SUFFIXES = {"saved_model": "", "graph_def": ".pb", "pbtxt": ".pbtxt"}


@dataclass
class Work:
    """A model on its way through the steps.

    Attributes:
        place: the folder of the results.
        name: the name of the model in its files.
        model: the model, as it is by now.
        data: the data to calibrate with.
        source: the path of the model.
        scheme: the scheme that it was quantized by, if it was.
        files: the names of the written files.
        stages: the model as it was after each step, for a page; None for no page.
    """

    place: Path
    name: str
    model: Any
    data: DataSource | None
    source: Path
    scheme: str | None = None
    files: list[str] = field(default_factory=list)
    stages: dict[str, Any] | None = None

    def target(self, suffix: str) -> Path:
        """Return where a file goes; none of the same name may be there."""
        path = self.place / f"{self.name}{suffix}"
        count = 2
        while path.exists():
            path = self.place / f"{self.name}_{count}{suffix}"
            count += 1
        self.files.append(path.name)
        return path


def _fold(work: Work, step: PipelineStep) -> Any:
    from geutil.batchnorm import fold_batch_norms

    return fold_batch_norms(work.model, strict=bool(step.option("strict")))


def _strip(work: Work, step: PipelineStep) -> Any:
    work.model = work.model.strip_training()
    return work.model.strip_report


def _freeze(work: Work, step: PipelineStep) -> Any:
    work.model = work.model.freeze()
    return repr(work.model)


def _unroll(work: Work, step: PipelineStep) -> Any:
    work.model = work.model.unroll(**dict(step.options))
    return repr(work.model)


def _batch_size(work: Work, step: PipelineStep) -> Any:
    work.model = work.model.set_batch_size(step.option("size"))
    return repr(work.model)


def _quantize(work: Work, step: PipelineStep) -> Any:
    """Quantize a model, and set its ranges if there is data."""
    from geutil.quantize import calibrate, quantize

    options = dict(step.options)
    rounding = options.pop("rounding", None)
    method = options.pop("method", "best")
    work.scheme = options.get("scheme")
    reports: list[Any] = [quantize(work.model, is_training=False, **options)]
    # Schemes that keep activations in float have no ranges to set.
    is_ranged = work.scheme is None or work.scheme.startswith("int")
    if work.data is not None:
        batches = _batches(work)
        reports.append(
            calibrate(work.model, batches, method, rounding=rounding, progress=False)
        )
        if work.data.drawn:
            reports.append(_DRAWN_WARNING)
    elif is_ranged:
        reports.append(_NO_DATA)
    return "\n".join(map(str, reports))


def _batches(work: Work) -> Any:
    """Return the data of a model, as `calibrate` takes it."""
    import numpy as np

    from geutil.model.comparison import bounds_of_indices, random_inputs

    data = work.data
    if data is None or data.path is not None:
        return None if data is None else data.path
    if data.pickled:
        return pickle.loads(data.pickled)(str(work.source))
    random = np.random.default_rng(0)
    inputs = work.model.inputs
    bounds = bounds_of_indices(inputs)
    return [random_inputs(inputs, random, None, bounds) for _ in range(_DRAWN)]


def _save(work: Work, step: PipelineStep) -> Any:
    form = step.option("format") or "saved_model"
    path = work.model.save(work.target(_SUFFIXES[form]), form)
    return f"{path.name}: {work.model!r}"


def _tflite(work: Work, step: PipelineStep) -> Any:
    from geutil.quantize import to_tflite
    from geutil.quantize.planning.network import live_simulations

    scheme = step.option("scheme") or work.scheme
    if scheme is None and not live_simulations(work.model.graph):
        return f"{work.model.save(work.target('.tflite'), 'tflite').name}, in float"
    order = step.option("order") or "converter"
    return _write(work, to_tflite(work.model, scheme=scheme, order=order))


def _write(work: Work, blob: bytes) -> str:
    # Bytes 4 to 8 of a TFLite file say what it is.
    path = work.target(".tflite" if blob[4:8] == b"TFL3" else ".bin")
    path.write_bytes(blob)
    return f"{path.name}, {len(blob):,} bytes"


def _call(work: Work, step: PipelineStep) -> Any:
    """Call a function of the user."""
    from geutil.errors import ArgumentTypeError
    from geutil.lazy import Shown
    from geutil.model import Model

    result = pickle.loads(step.pickled)(work.model)
    if isinstance(result, Model):
        work.model = result
        return repr(result)
    if isinstance(result, bytes):
        return _write(work, result)
    if result is None or isinstance(result, Shown):
        return result
    raise ArgumentTypeError(
        f"'{step.name}' returned a {type(result).__name__}; return a model, bytes, a "
        "report, or nothing"
    )


STEPS: Mapping[str, Callable[[Work, PipelineStep], Any]] = {
    "fold": _fold,
    "strip": _strip,
    "freeze": _freeze,
    "unroll": _unroll,
    "batch-size": _batch_size,
    "quantize": _quantize,
    "save": _save,
    "tflite": _tflite,
}
"""The functions of steps, by their names in `geutil.jobs.batch_inputs.OPTIONS`."""


def run(job: jobs.Job, place: Path) -> None:
    """Take a model through the steps, and note each."""
    notes: dict[str, Any] = {"steps": [], "files": [], "error": "", "complete": False}
    try:
        for name, step in _work(job, place, notes):
            notes["step"] = name
            write_json(place / jobs.PROGRESS, notes)
            began = time.monotonic()
            report = step()
            text = "" if report is None else str(report)
            seconds = time.monotonic() - began
            notes["steps"].append({"name": name, "seconds": seconds, "text": text})
        notes["complete"] = True
    # Any failure of a model is told of it.
    except Exception as error:
        traceback.print_exc()
        notes["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    notes["peak_bytes"] = _peak()
    write_json(place / jobs.PROGRESS, notes)


def _work(
    job: jobs.Job, place: Path, notes: dict[str, Any]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the steps by name, opening and writing among them."""
    path = Path(job.entry.path)
    opened: list[Model] = []
    yield "open", partial(_open, path, job.signature, opened)
    stages: dict[str, Any] | None = (
        {"as it was": opened[0].cut()} if job.pages else None
    )
    name = Path(job.entry.name).name
    work = Work(place, name, opened[0], job.data, path, stages=stages)
    for step in job.steps:
        before = len(work.files)
        yield str(step), partial(STEPS.get(step.name, _call), work, step)
        if stages is not None:
            new = work.files[before:]
            label = f"{len(stages)}: {step}"
            # A written file is a stage; the model did not change.
            if not new:
                stages[label] = work.model.cut()
            elif new[0].endswith(".tflite"):
                stages[label] = place / new[0]
    if not work.files:
        yield "save", partial(_save, work, PipelineStep("save"))
    if stages is not None:
        yield "page", partial(_page, work, place / "report.html")
    notes["files"] = work.files


def _open(path: Path, signature: str | None, opened: list[Model]) -> str:
    from geutil import model

    if path.is_file() and is_tflite_file(path):
        file: Any = model.open(str(path))
        opened.append(model.from_tflite(file, signature=signature))
    else:
        opened.append(model.open(str(path), signature=signature))
    return repr(opened[0])


def _page(work: Work, target: Path) -> str:
    from geutil import report

    stages = work.stages or {}
    title = f"{work.source.name}, stage by stage"
    if len(stages) > 1:
        page = report.pipeline(stages, title=title)
    else:
        page = report.view(work.model, title=title)
    work.files.append(target.name)
    return page.save(target).name


def _peak() -> int:
    """Return the most bytes that this process had resident."""
    peak = jobs.peak_of("self")
    if peak:
        return peak
    import resource  # which Windows has not

    # In kilobytes, but for macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _end_with_the_other_end() -> None:
    """End this process and its children when the one that watches it is gone."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Do the job of the folder that the command line names, or serve."""
    if sys.argv[1] == SERVE:
        _import_all()
        serve(socket.socket(fileno=int(sys.argv[2])), _do)
    else:
        _do(Path(sys.argv[1]))


def _do(place: Path) -> None:
    """Do the job in a folder, as long as somebody watches."""
    threading.Thread(target=_end_with_the_other_end, daemon=True).start()
    job: jobs.Job = pickle.loads((place / jobs.JOB).read_bytes())
    with spoken_with(job.vocabulary):
        run(job, place)


def _import_all() -> None:
    """Import the modules of all steps, without a thread: nothing is run."""
    import geutil.batchnorm
    import geutil.model.opener
    import geutil.quantize
    import geutil.report  # noqa: F401


if __name__ == "__main__":
    main()
