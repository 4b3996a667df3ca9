"""Models that the tests of this folder share."""

import pytest

from tests.model import samples


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A folder with frozen.pb, frozen.pbtxt and the SavedModel `lookup`."""
    folder = tmp_path_factory.mktemp("models")
    samples.write_all(folder)
    return folder
