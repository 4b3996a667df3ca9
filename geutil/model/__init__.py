"""L4, models: opens, inspects, edits and saves them."""

from geutil.model.comparison.comparing import Comparison
from geutil.model.comparison.differences import Difference
from geutil.model.errors import ModelError
from geutil.model.files.inspecting import inspect
from geutil.model.files.inspection import Inspection
from geutil.model.model import Model
from geutil.model.opening import open

__all__ = [
    "Comparison",
    "Difference",
    "Inspection",
    "Model",
    "ModelError",
    "inspect",
    "open",
]
