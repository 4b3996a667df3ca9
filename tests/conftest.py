"""Fixtures that tests of all layers share."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest
import tensorflow as tf

from tests import settings, thorough

if settings.V1:
    tf.compat.v1.disable_v2_behavior()


def pytest_configure(config):
    thorough.select(config.getoption("markexpr"))


@pytest.fixture(params=settings.NAMES)
def setting(request):
    """Each setting in turn: a v1 graph, a graph under TF 2, a tracing FuncGraph."""
    return settings.Setting(request.param)
