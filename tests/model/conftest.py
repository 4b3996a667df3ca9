"""Models that the tests of this folder share."""

import pytest

from geutil.model.files import keras_files
from tests.kept import kept
from tests.model import samples


@pytest.fixture(scope="session")
def models():
    """A folder with frozen.pb, frozen.pbtxt and the SavedModel `lookup`."""
    return kept(samples.write_all)


@pytest.fixture(autouse=True, scope="session")
def patience():
    """The process that reads an HDF5 file may start slowly where others run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keras_files, "_SECONDS", 600)
        yield
