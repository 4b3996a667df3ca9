"""Memory-saving gradients: gradient checkpointing for TensorFlow graphs.

Names are imported at first use: `geutil.gradients.planner` needs no TensorFlow.
"""

import typing

from geutil import lazy

__all__ = [
    "MIN_CHECKPOINT_SIZE",
    "Budget",
    "EncodedTensor",
    "GradientError",
    "KeptTensor",
    "LoopValues",
    "PipelinedStep",
    "Plan",
    "PlanCurve",
    "Policy",
    "RecomputedOp",
    "Report",
    "all_of",
    "any_of",
    "by_name",
    "by_type",
    "capture_ops",
    "checkpointed",
    "encoding_errors",
    "explain",
    "format_ops",
    "gradients",
    "gradients_collection",
    "gradients_memory",
    "gradients_speed",
    "inside",
    "larger_than",
    "last_report",
    "not_",
    "order_updates",
    "pipelined",
    "plan",
    "plan_curve",
    "toposort",
]

if typing.TYPE_CHECKING:
    from geutil.gradients.api import (
        GradientError,
        encoding_errors,
        explain,
        gradients,
        gradients_collection,
        gradients_memory,
        gradients_speed,
        plan,
        plan_curve,
    )
    from geutil.gradients.checkpointed_calls import checkpointed
    from geutil.gradients.choices import MIN_CHECKPOINT_SIZE, LoopValues
    from geutil.gradients.encodings import EncodedTensor
    from geutil.gradients.lifecycle import order_updates
    from geutil.gradients.plans import Budget, Plan, PlanCurve
    from geutil.gradients.policies import (
        Policy,
        all_of,
        any_of,
        by_name,
        by_type,
        capture_ops,
        format_ops,
        inside,
        larger_than,
        not_,
        toposort,
    )
    from geutil.gradients.report import KeptTensor, RecomputedOp, Report, last_report
    from geutil.pipeline import PipelinedStep, pipelined
else:
    __getattr__, __dir__ = lazy.names_of(
        __name__,
        {
            module: names.split()
            for module, names in {
                "api": "GradientError encoding_errors explain gradients "
                "gradients_collection gradients_memory gradients_speed plan plan_curve",
                "choices": "LoopValues MIN_CHECKPOINT_SIZE",
                "encodings": "EncodedTensor",
                "geutil.pipeline": "PipelinedStep pipelined",
                "plans": "Budget Plan PlanCurve",
                "policies": "Policy all_of any_of by_name by_type capture_ops "
                "format_ops inside larger_than not_ toposort",
                "report": "KeptTensor RecomputedOp Report last_report",
                "lifecycle": "order_updates",
                "checkpointed_calls": "checkpointed",
            }.items()
        },
    )
