"""L4: opens, edits and saves models."""

from geutil.model.errors import ModelError
from geutil.model.model import Model
from geutil.model.opening import open

__all__ = ["Model", "ModelError", "open"]
