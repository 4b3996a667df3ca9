"""Small networks, for all tests of gradients."""

import pytest

from tests.gradients.networks import SMALL, small_step, trace_forward


@pytest.fixture(scope="session", params=SMALL)
def step(request):
    """The training step of each network in turn."""
    return small_step(request.param)


@pytest.fixture
def forward(step):
    """Each network's forward part, in a new graph that a test may add gradients to."""
    return trace_forward(step)
