"""Fixtures for tests on real networks."""

import pytest

from tests.model.networks.fresh import FreshProcesses


@pytest.fixture(scope="session")
def fresh():
    return FreshProcesses()
