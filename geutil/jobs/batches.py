"""`batch`: a pipeline of steps over many models, and the executors of its jobs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from geutil.errors import ArgumentTypeError, MissingExtraError, ModelError, Words
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
from geutil.jobs.model_job import (
    REPORT,
    WORK,
    ForkServer,
    Job,
    can_fork,
    run_job,
    stop_jobs,
)
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
                stop_jobs(place, todo[0].run)
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
    """Return whether the results of an earlier call are those of this one."""
    return (
        old.is_done
        and old.fingerprint == new.fingerprint
        and results_are_there(output / old.name, old.files)
    )


def _check_place(output: Path, name: str) -> None:
    place = output / name
    if place.exists() and not (place / REPORT).is_file():
        raise ModelError(
            f"'{place}' is no result of a batch, and is not replaced; choose another "
            "folder for the results"
        )


@contextlib.contextmanager
def _work_folder(output: Path, todo: Sequence[Job]) -> Iterator[None]:
    """Have a folder for unfinished results, without those of calls that died."""
    work = output / WORK
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


T = TypeVar("T")
TRIES = 3
"""How often a model is begun at most whose workers die."""
_GRACE = 10.0
"""Seconds for processes to end that are asked to stop."""


class RayExecutor(Executor):
    """An executor that runs calls as tasks of a Ray cluster, with one CPU each.

    Call `ray.init` first to connect to a cluster or start one; otherwise Ray does so at
    the first call. The cluster keeps running afterwards.

    Args:
        options: options of the tasks, as `ray.remote` takes them, such as
            `num_cpus=2` or `resources={"fast": 1}`.

    Raises:
        MissingExtraError: Ray is not installed.

    Example:
        >>> from geutil.model import RayExecutor
        >>> with RayExecutor(num_cpus=2) as executor:  # doctest: +SKIP
        ...     executor.submit(sum, [1, 2]).result()
        3
    """

    def __init__(self, **options: Any) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingExtraError(
                "RayExecutor needs Ray; install it with `pip install 'geutil[ray]'`"
            ) from error
        self._ray = ray
        # A batch begins again itself what dies, and tells.
        self._options = {"max_retries": 0, **options}
        self._references: list[Any] = []
        self._cancelled: frozenset[Any] = frozenset()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run a function as a task.

        Args:
            fn: the function.
            args: its arguments, by position.
            kwargs: its arguments, by keyword.
        """
        task = self._ray.remote(**self._options)(_call)
        reference = task.remote(fn, *args, **kwargs)
        self._references.append(reference)
        future: Future[T] = Future()
        settle = partial(self._settle, future, reference)
        reference.future().add_done_callback(settle)
        return future

    def _settle(self, future: Future[Any], reference: Any, task: Future[Any]) -> None:
        """Hand the result of a task on; one that Ray cancelled is a cancelled future.

        Ray has its own error for that, and another one where the task had begun. One
        that is interrupted just then may say that it returned None.
        """
        error = task.exception()
        is_cancelled = isinstance(error, self._ray.exceptions.TaskCancelledError)
        if is_cancelled or reference in self._cancelled:
            future.cancel()
        if not future.set_running_or_notify_cancel():
            return
        if error is None:
            future.set_result(task.result())
        else:
            future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for the tasks, or cancel them.

        Args:
            wait: whether to wait.
            cancel_futures: whether to cancel tasks; Ray also interrupts running ones.
        """
        if cancel_futures and self._references:
            self._cancel(wait)
        elif wait and self._references:
            self._ray.wait(self._references, num_returns=len(self._references))
        self._references.clear()

    def _cancel(self, wait: bool) -> None:
        """Cancel jobs that have not ended; Ray may lose the interrupt of a new task."""
        pending = self._not_ended(self._references, 0.0)
        self._cancelled |= frozenset(pending)
        for times in itertools.count():
            for reference in pending:
                self._ray.cancel(reference, force=times >= _INTERRUPTS)
            if not wait or not pending:
                return
            pending = self._not_ended(pending, _PATIENCE)

    def _not_ended(self, references: Sequence[Any], seconds: float) -> list[Any]:
        """Return the tasks that have not ended after some seconds."""
        count = len(references)
        waiting = list(references)
        _, pending = self._ray.wait(waiting, num_returns=count, timeout=seconds)
        return list(pending)


_INTERRUPTS = 5
"""So many times a task is interrupted before its worker is ended."""
_PATIENCE = 2.0
"""Seconds from one interrupt to the next."""


def _call(fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Call anything, since tasks of Ray are functions of Python alone."""
    return fn(*args, **kwargs)


class JobRunner:
    """Jobs on an executor; those whose workers die begin again."""

    def __init__(self, executor: Executor | None, workers: int) -> None:
        self.notes: list[str] = []
        self._workers = workers
        self._own: ThreadPoolExecutor | None = None
        self._server: ForkServer | None = None
        self._executor = executor
        self._pending: dict[Future[BatchEntry], Job] = {}
        self._losses: dict[str, list[str]] = {}

    def _submit_here(self, job: Job) -> Future[BatchEntry]:
        if self._own is None:
            # Threads, since each does no more than watch a process.
            self._own = ThreadPoolExecutor(self._workers, "geutil-batch")
            if can_fork():
                self._server = ForkServer()
        address = "" if self._server is None else self._server.address
        return self._own.submit(run_job, replace(job, server=address))

    def run(self, jobs: Sequence[Job]) -> Iterator[BatchEntry]:
        """Yield the outcomes of jobs, as they end."""
        for job in jobs:
            self._submit(job)
        while self._pending:
            ended, _ = concurrent.futures.wait(
                self._pending, return_when=concurrent.futures.FIRST_COMPLETED
            )
            # In the order of the jobs, if several ended.
            for future in [f for f in self._pending if f in ended]:
                entry = self._result(future)
                if entry is not None:
                    yield entry

    def _submit(self, job: Job) -> None:
        if self._executor is not None:
            try:
                self._pending[self._executor.submit(run_job, job)] = job
                return
            except BrokenExecutor as error:
                self._give_up(error)
        self._pending[self._submit_here(job)] = job

    def _give_up(self, error: BaseException) -> None:
        """Go on with processes here, since a broken executor takes nothing more."""
        if self._executor is not None:
            self.notes.append(
                f"the executor broke ({type(error).__name__}: {_line(error)}); "
                f"{self._workers} process(es) at once on this machine did the rest"
            )
            self._executor = None

    def _result(self, future: Future[BatchEntry]) -> BatchEntry | None:
        """Return the outcome of a job; None if it begins again.

        `run_job` tells of all that a model does. An error comes from the executor or
        from the worker: it died, or could not read or write files.
        """
        job = self._pending.pop(future)
        losses = self._losses.setdefault(job.entry.name, [])
        try:
            entry = future.result()
        except BrokenExecutor as error:
            # All that was submitted ends so, whether it was begun or not.
            self._give_up(error)
            self._submit(job)
            return None
        except (Exception, concurrent.futures.CancelledError) as error:
            losses.append(f"{type(error).__name__}: {_line(error)}")
            if len(losses) < TRIES:
                self._submit(job)
                return None
            reason = f"lost {len(losses)} times by its worker; {losses[-1]}"
            return replace(job.entry, action="lost", reason=reason, tries=len(losses))
        if entry.tries > 1 or losses:
            tries = max(entry.tries, len(losses) + 1)
            why = f" ({losses[-1]})" if losses else ""
            self.notes.append(f"'{entry.name}' was begun {tries} times{why}")
            entry = replace(entry, tries=tries)
        return entry

    def stop(self) -> dict[str, BatchEntry]:
        """Cancel jobs that have not begun; return the outcomes of the rest, by name."""
        for future in self._pending:
            future.cancel()
        running = [future for future in self._pending if not future.done()]
        concurrent.futures.wait(running, _GRACE)
        ended = {}
        for future, job in self._pending.items():
            entry = replace(job.entry, action="stopped", reason="the batch was stopped")
            if future.done() and not future.cancelled() and not future.exception():
                entry = future.result()
            ended[entry.name] = entry
        return ended

    def close(self) -> None:
        """End the processes that were started here."""
        if self._own is not None:
            self._own.shutdown(cancel_futures=True)
        if self._server is not None:
            self._server.close()


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
