"""`batch`: a pipeline of steps over many models, each in a process of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

from geutil.errors import ArgumentTypeError, ModelError, Words
from geutil.jobs import model_job as jobs
from geutil.jobs.batch_inputs import (
    Data,
    DataSource,
    ModelSource,
    PathLike,
    Paths,
    Pipeline,
    check_order,
    data_of,
    fingerprint,
    results_are_there,
    sources_of,
    steps_of,
)
from geutil.jobs.batch_report import STATE, BatchEntry, BatchReport
from geutil.jobs.executors import JobRunner
from geutil.jobs.model_job import Job
from geutil.progress import FOLDER, MADE, counted, note

LOCK = ".batch.lock"
"""A file, in the folder of the results, that is locked while they are written."""


def batch(
    paths: Paths,
    pipeline: Pipeline,
    output: PathLike,
    *,
    data: Data = None,
    signature: str | None = None,
    executor: Executor | None = None,
    workers: int | None = None,
    timeout: float | None = 3600.0,
    resume: bool = True,
    pages: bool = False,
    progress: bool | None = None,
) -> BatchReport:
    """Run a pipeline on many models, each in its own process.

    A model that is refused, crashes TensorFlow or hangs does not affect the others. The
    steps are text, with options after colons, in any order that makes sense:

    - "fold", "strip", "freeze", "unroll", "batch-size=N": see `fold_batch_norms` and
      the methods of `Model`;
    - "quantize", with `scheme`, `weight_bits`, `activation_bits`, `method`, `rounding`:
      see `geutil.quantize.quantize`, and, with data, `calibrate`;
    - "tflite", with `scheme` and `order`, writes a TFLite file: see `to_tflite`;
      without a scheme, a model that is not quantized gives a float file;
    - "save=FORMAT" writes the model: "saved_model", "graph_def" or "pbtxt". If no step
      writes a file, the model is saved at the end as a SavedModel.

    A step can also be a function that a process can import. It takes a `Model`, and
    returns a `Model` to continue with, bytes to write, or, if it edited the model, None
    or a report.

    `output` gets a folder for each model, with the written files, `report.json` and
    `log.txt`; for a model that is not done, only the last two. `batch.json` contains
    the report of the batch, which is updated after each model. A call that finds one
    runs the models that are not done. A model is run again if the model, its data or
    the pipeline changed, by names, sizes and times of files and the source of
    functions, or if results are missing.

    Args:
        paths: a folder, for all models in it, in any format that `open` reads; a
            pattern, such as "models/*.keras"; a model; or several of these. For TFLite
            files the steps use the graph that `from_tflite` returns.
        pipeline: the steps: text, such as "fold,quantize,tflite", a function, or a list
            of both.
        output: the folder of the results, created if it is missing.
        data: the data that "quantize" calibrates with: the path of a `.npz` file, or of
            a folder of them, a batch each; a folder that has `NAME.npz`, or such a
            folder `NAME`, for each model; a function from the path of a model to the
            data that `calibrate` takes; or "random", for random inputs, which give
            meaningless ranges.
        signature: the signature of each model; None as in `open`.
        executor: runs the jobs: any executor of `concurrent.futures`, such as
            `RayExecutor`, or `get_executor()` of a Dask client. Its workers need
            geutil, and the folders under the same paths. Each job starts a process for
            its model. None starts processes on this machine.
        workers: the number of processes that run at once on this machine; None is one
            per core.
        timeout: the time limit for each model in seconds; None is no limit.
        resume: whether to skip models that are done already.
        pages: whether to write `report.html` for each model, with all its stages.
        progress: whether to show a progress bar on stderr; None shows one on a
            terminal, if rich is installed.

    Returns:
        The outcome of each model, sorted by name.

    Raises:
        ArgumentTypeError: an argument is of another type, or a function cannot be
            imported by another process.
        ModelError: there is nothing to do; the pipeline has no such step, or cannot
            work without data; the folder contains something other than such results, or
            another call is writing to it.
        MissingExtraError: `progress` is True, and rich is not installed.
        KeyboardInterrupt: the user stopped it. Its processes are stopped, and the next
            call continues.

    Cost: the steps, and one start of TensorFlow (about 3 s); on an executor, and on
    systems other than Linux, one for each model.

    Example:
        >>> import tempfile
        >>> from geutil.model import batch
        >>> out = tempfile.mkdtemp()
        >>> steps = "strip,save=graph_def"
        >>> report = batch("testdata/two_signatures", steps, out, signature="encode")
        >>> [(entry.name, entry.action, *entry.files) for entry in report.entries]
        [('two_signatures', 'done', 'two_signatures.pb')]
        >>> again = batch("testdata/two_signatures", steps, out, signature="encode")
        >>> again.entries[0].action
        'done before'
    """
    began = time.monotonic()
    steps = steps_of(pipeline)
    check_order(steps, with_data=data is not None)
    _check(executor, workers, timeout)
    place = Path(output).absolute()
    sources = sources_of(paths, place)
    entries, todo = _planned(
        sources,
        data_of(data, sources),
        Job(
            BatchEntry("", "", "stopped"),
            place,
            uuid.uuid4().hex,
            steps,
            None,
            signature,
            timeout,
            pages,
        ),
        resume=resume,
    )
    report = BatchReport(str(place), ",".join(map(str, steps)))
    runner = JobRunner(executor, max(1, min(workers or _cores(), len(todo))))

    def written() -> BatchReport:
        listed = tuple(entries[name] for name in sorted(entries))
        notes, seconds = tuple(runner.notes), time.monotonic() - began
        found = replace(report, entries=listed, notes=notes, seconds=seconds)
        found.write()
        return found

    with _work_folder(place, todo), contextlib.closing(runner):
        try:
            done = len(sources) - len(todo)
            listed = runner.run(todo)
            for entry in counted(listed, len(sources), progress, "models", done=done):
                entries[entry.name] = entry
                # A batch that is killed resumes from the report.
                written()
        except BaseException:
            # An interrupt, too, ends the processes and keeps the outcomes.
            if todo:
                jobs.stop_jobs(place, todo[0].run)
            entries |= runner.stop()
            written()
            raise
    return written()


def _cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _check(
    executor: Executor | None, workers: int | None, timeout: float | None
) -> None:
    """Refuse arguments before anything is looked at."""
    if executor is not None:
        if not isinstance(executor, Executor):
            raise ArgumentTypeError(
                "executor= is an executor of concurrent.futures, not "
                f"{type(executor).__name__}; a client of Dask has get_executor(), and "
                "RayExecutor is one for Ray"
            )
        if workers is not None:
            raise ModelError("workers= is for this machine; the executor has its own")
    if workers is not None and workers < 1:
        raise ModelError(
            "is too few; at least one is needed",
            subject=Words(f"workers={workers}", workers),
        )
    if timeout is not None and not timeout > 0:
        raise ModelError(
            "is no time limit",
            subject=Words(f"timeout={timeout}", timeout),
            remedy="pass seconds, or None",
        )


def _planned(
    sources: Sequence[ModelSource],
    data: Mapping[str, DataSource | None],
    common: Job,
    *,
    resume: bool,
) -> tuple[dict[str, BatchEntry], list[Job]]:
    """Return an entry for each source by its name, and the jobs that are to run."""
    before = _before(common.output)
    entries: dict[str, BatchEntry] = {}
    todo = []
    for source in sources:
        entry = BatchEntry(source.name, str(source.path), "stopped", "it was not begun")
        found = data.get(source.name)
        if source.why_not:
            entry = replace(entry, action="not a model", reason=source.why_not)
        elif not source.path.exists():
            reason = "there is nothing"
            entry = replace(entry, action="failed", step="open", reason=reason)
        elif data and found is None:
            reason = f"the folder of data has no {source.name}.npz"
            entry = replace(entry, action="failed", step="quantize", reason=reason)
        else:
            mark = fingerprint(source, common.steps, found, common.signature)
            entry = replace(entry, fingerprint=mark)
            old = before.get(source.name)
            if resume and old is not None and _holds(old, entry, common.output):
                entry = replace(old, action="done before")
            else:
                _check_place(common.output, source.name)
                todo.append(replace(common, entry=entry, data=found))
        entries[source.name] = entry
    return entries, todo


def _before(output: Path) -> dict[str, BatchEntry]:
    if not (output / STATE).exists():
        return {}
    return {entry.name: entry for entry in BatchReport.load(output).entries}


def _holds(old: BatchEntry, new: BatchEntry, output: Path) -> bool:
    """Tell whether the results of an earlier call are those of this one."""
    return (
        old.is_done
        and old.fingerprint == new.fingerprint
        and results_are_there(output / old.name, old.files)
    )


def _check_place(output: Path, name: str) -> None:
    place = output / name
    if place.exists() and not (place / jobs.REPORT).is_file():
        raise ModelError(
            f"'{place}' is no result of a batch, and is not replaced; choose another "
            "folder for the results"
        )


@contextlib.contextmanager
def _work_folder(output: Path, todo: Sequence[Job]) -> Iterator[None]:
    """Have a folder for unfinished results, without those of calls that died."""
    work = output / jobs.WORK
    note(FOLDER, str(output))
    output.mkdir(parents=True, exist_ok=True)
    with _locked(output):
        note(MADE, str(work))
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(work)
        for one in todo[:1]:
            (work / one.run).mkdir(parents=True)
        try:
            yield
        finally:
            shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Keep other calls from writing to a folder, where the system has such locks."""
    try:
        import fcntl
    except ImportError:
        # Windows has no such locks.
        yield
        return
    file = output / LOCK
    with file.open("w") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ModelError(
                f"another batch writes to '{output}'; wait for its end, or choose "
                "another folder for the results"
            ) from error
        note(MADE, str(file))
        try:
            yield
        finally:
            file.unlink(missing_ok=True)
