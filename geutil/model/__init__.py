"""L4: opens, edits and saves models."""

from geutil.model.errors import ModelError
from geutil.model.model import Model
from geutil.model.opening import open  # noqa: A004 - a module's open, as in gzip.open.

__all__ = ["Model", "ModelError", "open"]
