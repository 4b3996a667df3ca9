"""A test of the compatible surface runs in all settings, one after another."""

import pytest

from tests.select.tables import EachSetting


@pytest.fixture
def setting():
    return EachSetting()
