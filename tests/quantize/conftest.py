"""Fixtures of the tests of quantization."""

import numpy as np
import pytest

_STATES = {}


@pytest.fixture(autouse=True)
def same_draws(request):
    """Let what a test draws not depend on which tests of its module ran before."""
    for name, value in vars(request.module).items():
        if isinstance(value, np.random.Generator):
            state = value.bit_generator.state
            first = _STATES.setdefault((request.module.__name__, name), state)
            value.bit_generator.state = first
