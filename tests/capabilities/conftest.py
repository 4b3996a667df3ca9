"""Models that the tests of this folder share."""

from tests.model.conftest import models, patience

__all__ = ["models", "patience"]
