"""L5, jobs: a pipeline of steps over many models, each in a process of its own.

`batch` runs it in processes of this machine, or on executors of Ray and Dask. A job
that fails or dies is an entry of the report; the others go on, and a stopped batch can
be resumed. The steps are methods of models, or the caller's functions.
"""

import typing

from geutil import lazy

__all__ = [
    "BatchEntry",
    "BatchReport",
    "BatchStep",
    "RayExecutor",
    "batch",
]

if typing.TYPE_CHECKING:
    from geutil.jobs.batch_report import BatchEntry, BatchReport, BatchStep
    from geutil.jobs.batches import RayExecutor, batch
else:
    __getattr__, __dir__ = lazy.names_of(
        __name__,
        {
            "batches": ("RayExecutor", "batch"),
            "batch_report": ("BatchEntry", "BatchReport", "BatchStep"),
        },
    )
