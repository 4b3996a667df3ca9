"""Fixtures for tests of edits."""

import pytest

from tests.select.tables import EachSetting


@pytest.fixture
def setting():
    return EachSetting()
