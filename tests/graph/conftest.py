"""Fixtures of the L0 tests: both kinds of control flow, and a very long chain."""

import pytest
import tensorflow as tf

from tests.graph import building
from tests.thorough import length


@pytest.fixture
def control_flow_v1():
    """Make `tf.compat.v1.while_loop` and `cond` emit Enter, Switch and so on."""
    enabled = tf.compat.v1.control_flow_v2_enabled()
    tf.compat.v1.disable_control_flow_v2()
    yield
    if enabled:
        tf.compat.v1.enable_control_flow_v2()


@pytest.fixture
def control_flow_v2():
    """Make `tf.while_loop` and `tf.cond` emit While and If."""
    enabled = tf.compat.v1.control_flow_v2_enabled()
    tf.compat.v1.enable_control_flow_v2()
    yield
    if not enabled:
        tf.compat.v1.disable_control_flow_v2()


@pytest.fixture
def loops(control_flow_v1):
    """Two version 1 while loops, one after the other."""
    return building.two_loops()


@pytest.fixture(scope="session")
def chain():
    """A graph of 100,000 ops in a row, or fewer; whoever edits it puts it back.

    Tests may add ops beside the chain, so they ask for its ops by `chain_ops`.
    """
    return building.chain(length(100_000))


@pytest.fixture
def chain_ops(chain):
    """The ops of the chain alone, in a new list."""
    return chain.get_operations()[: length(100_000)]
