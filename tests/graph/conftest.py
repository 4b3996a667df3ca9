"""Fixtures of the L0 tests: loops of version 1, and a very long chain."""

import pytest

from tests.graph import building
from tests.thorough import length


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
