"""Executors: where the jobs of a batch run, and how the death of workers is handled."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from geutil.errors import MissingExtraError
from geutil.jobs.batch_report import BatchEntry
from geutil.jobs.model_job import ForkServer, Job, can_fork, run_job

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
        return self._own.submit(run_job, dataclasses.replace(job, server=address))

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
            return dataclasses.replace(
                job.entry, action="lost", reason=reason, tries=len(losses)
            )
        if entry.tries > 1 or losses:
            tries = max(entry.tries, len(losses) + 1)
            why = f" ({losses[-1]})" if losses else ""
            self.notes.append(f"'{entry.name}' was begun {tries} times{why}")
            entry = dataclasses.replace(entry, tries=tries)
        return entry

    def stop(self) -> dict[str, BatchEntry]:
        """Cancel jobs that have not begun; return the outcomes of the rest, by name."""
        for future in self._pending:
            future.cancel()
        running = [future for future in self._pending if not future.done()]
        concurrent.futures.wait(running, _GRACE)
        ended = {}
        for future, job in self._pending.items():
            entry = dataclasses.replace(
                job.entry, action="stopped", reason="the batch was stopped"
            )
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
