"""Doctests have the processes that they start forked, as tests have."""

import pytest

from tests.processes import forked


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Run a test; if it is a doctest, with forked processes."""
    if not isinstance(item, pytest.DoctestItem):
        return (yield)
    with forked():
        return (yield)
