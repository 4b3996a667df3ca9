"""Fixtures for tests of edits."""

import pytest
import tensorflow as tf

from tests.select.tables import EachSetting


@pytest.fixture
def setting():
    return EachSetting()


@pytest.fixture
def control_flow_v1():
    enabled = tf.compat.v1.control_flow_v2_enabled()
    tf.compat.v1.disable_control_flow_v2()
    yield
    if enabled:
        tf.compat.v1.enable_control_flow_v2()
