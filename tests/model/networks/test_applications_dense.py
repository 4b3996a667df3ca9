"""The other half of the Keras applications: opened, cut, spliced, saved and loaded."""

import pytest

from tests.model.networks.application_tests import RoundTrips
from tests.model.networks.applications import Network
from tests.thorough import chosen

NAMES = ["EfficientNetB0", "DenseNet121", "InceptionV3"]


@pytest.fixture(scope="module", params=chosen(NAMES))
def network(request, tmp_path_factory):
    return Network(request.param, tmp_path_factory.mktemp("networks"))


class TestRoundTrips(RoundTrips):
    pass
