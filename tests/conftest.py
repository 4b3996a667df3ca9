"""Fixtures that tests of all layers share."""

import gc
import os
import platform

if platform.machine() in ("x86_64", "AMD64"):
    # It is off where a processor has no AVX512, and all peaks are others then. What
    # holds without it has tests of its own.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest
import tensorflow as tf

from tests import settings, thorough

if settings.V1:
    tf.compat.v1.disable_v2_behavior()

# The first Session sets the number of threads of the whole process: not one of a test,
# after which others would measure something else.
tf.compat.v1.Session(graph=tf.Graph()).close()


def pytest_configure(config):
    thorough.select(config.getoption("markexpr"))


def pytest_collection_finish():
    # What is imported stays; each full collection would go through all of it.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 25)


@pytest.fixture(params=settings.NAMES)
def setting(request):
    """Each setting in turn: a v1 graph, a graph under TF 2, a tracing FuncGraph."""
    return settings.Setting(request.param)


@pytest.fixture
def graph():
    """A graph, the default one of the test."""
    with tf.Graph().as_default() as made:
        yield made


@pytest.fixture
def control_flow_v1():
    """Make `tf.while_loop` and `tf.cond` emit Enter, Switch and so on."""
    with settings.control_flow(1):
        yield


@pytest.fixture
def control_flow_v2():
    """Make `tf.while_loop` and `tf.cond` emit While and If."""
    with settings.control_flow(2):
        yield
