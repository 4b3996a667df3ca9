"""L4, models: opens, inspects, edits and saves them."""

from geutil.model.calling import ModelFunction
from geutil.model.comparison.comparing import Comparison
from geutil.model.comparison.differences import Difference
from geutil.model.errors import ModelError
from geutil.model.files.inspecting import inspect
from geutil.model.files.inspection import Inspection
from geutil.model.model import Body, Model
from geutil.model.opening import open
from geutil.model.training.report import Stripped, StripReport

__all__ = [
    "Body",
    "Comparison",
    "Difference",
    "Inspection",
    "Model",
    "ModelError",
    "ModelFunction",
    "StripReport",
    "Stripped",
    "inspect",
    "open",
]
