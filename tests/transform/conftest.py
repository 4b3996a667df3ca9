"""Fixtures for loops and conditionals of either version."""

import pytest
import tensorflow as tf

from tests import settings


@pytest.fixture
def control_flow_v1():
    """Make `tf.while_loop` and `tf.cond` build Enter, Merge, Switch and the like."""
    tf.compat.v1.disable_control_flow_v2()
    yield
    if not settings.V1:
        tf.compat.v1.enable_control_flow_v2()
