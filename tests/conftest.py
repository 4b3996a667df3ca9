"""Fixtures that tests of all layers share."""

import gc
import os
import platform
import sys

if platform.machine() in ("x86_64", "AMD64"):
    # It is off where a processor has no AVX512, and all peaks are others then. What
    # holds without it has tests of its own.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest

from tests import settings, thorough

if settings.V1:
    import tensorflow as tf

    tf.compat.v1.disable_v2_behavior()


def pytest_configure(config):
    thorough.select(config.getoption("markexpr"))


def pytest_sessionstart(session):
    # It takes 4 s to import, and the process that hands out the tests runs none.
    if session.config.pluginmanager.hasplugin("dsession"):
        return
    import tensorflow as tf

    # The first Session sets the number of threads of the whole process: not one of a
    # test, after which others would measure something else.
    tf.compat.v1.Session(graph=tf.Graph()).close()


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        import tensorflow as tf

        if not tf.config.list_physical_devices("GPU"):
            pytest.skip("needs a GPU")


def pytest_collection_finish():
    # What is imported stays; each full collection would go through all of it.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 10)


def pytest_sessionfinish():
    # The process ends; to collect first what its tests left takes seconds.
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def keras_names():
    """Count Keras's layers from one in each module: names depend on no other module."""
    if keras := sys.modules.get("keras"):
        keras.utils.clear_session(free_memory=False)


@pytest.fixture(params=settings.NAMES)
def setting(request):
    """Each setting in turn: a v1 graph, a graph under TF 2, a tracing FuncGraph."""
    return settings.Setting(request.param)


@pytest.fixture
def graph():
    """A graph, the default one of the test."""
    import tensorflow as tf

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
