"""L4, models: opens, inspects, edits and saves them."""

from geutil.errors import ModelError
from geutil.model.comparison import Comparison, Difference
from geutil.model.core import ModelFunction
from geutil.model.files.inspect_files import inspect
from geutil.model.files.inspection import Inspection
from geutil.model.model import Body, Model
from geutil.model.opening import open
from geutil.model.strip.report import Stripped, StripReport

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
