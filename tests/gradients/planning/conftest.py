"""A planner that searches for less long."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def few_moves():
    """Let each search make a tenth of its moves: enough for steps as small as here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("geutil.gradients.planning.under_budget._MOVES", 16_000)
        yield
