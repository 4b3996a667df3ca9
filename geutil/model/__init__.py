"""L4, models: opens, inspects, edits and saves them.

The names are imported when they are first used: `inspect` needs no TensorFlow.
"""

import typing

from geutil import lazy

__all__ = [
    "BatchEntry",
    "BatchReport",
    "BatchStep",
    "Body",
    "Comparison",
    "Difference",
    "Inspection",
    "Layer",
    "Model",
    "ModelError",
    "ModelFunction",
    "Power",
    "Powers",
    "RayExecutor",
    "StripReport",
    "Stripped",
    "TFLiteInspection",
    "batch",
    "from_tflite",
    "inspect",
    "open",
    "powers",
    "tflite_kinds",
]

if typing.TYPE_CHECKING:
    from geutil.capabilities.capability_kinds import Power, Powers
    from geutil.capabilities.scan import powers
    from geutil.errors import ModelError
    from geutil.jobs.batch_report import BatchEntry, BatchReport, BatchStep
    from geutil.jobs.batches import RayExecutor, batch
    from geutil.model.comparison import Comparison
    from geutil.model.core import ModelFunction
    from geutil.model.files.inspection import Inspection, TFLiteInspection
    from geutil.model.files.proto_files import inspect
    from geutil.model.inference_form import Stripped, StripReport
    from geutil.model.model import Body, Model
    from geutil.model.opener import from_tflite, open
    from geutil.model.sources.tflite_files import tflite_kinds
    from geutil.select.networks.outputs import Difference
    from geutil.select.selections import Layer
else:
    from geutil.errors import ModelError

    __getattr__, __dir__ = lazy.names_of(
        __name__,
        {
            "geutil.jobs.batch_report": ("BatchEntry", "BatchReport", "BatchStep"),
            "geutil.jobs.batches": ("RayExecutor", "batch"),
            "comparison": ("Comparison",),
            "core": ("ModelFunction",),
            "files.proto_files": ("inspect",),
            "files.inspection": ("Inspection", "TFLiteInspection"),
            "model": ("Body", "Layer", "Model"),
            "opener": ("from_tflite", "open"),
            "geutil.capabilities.capability_kinds": ("Power", "Powers"),
            "geutil.capabilities.scan": ("powers",),
            "geutil.select.networks.outputs": ("Difference",),
            "sources.tflite_files": ("tflite_kinds",),
            "inference_form": ("StripReport", "Stripped"),
        },
    )
