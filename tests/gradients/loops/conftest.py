"""The same few moves of the planner as in its own tests."""

from tests.gradients.planning.conftest import few_moves

__all__ = ["few_moves"]
