"""Half of the Keras applications: opened, cut, spliced, saved and loaded."""

import pytest

from tests.model.networks.application_tests import RoundTrips
from tests.model.networks.applications import Network
from tests.thorough import chosen

NAMES = ["ResNet50", "MobileNetV2", "MobileNetV3Small", "ConvNeXtTiny"]


@pytest.fixture(scope="module", params=chosen(NAMES))
def network(request, tmp_path_factory):
    return Network(request.param, tmp_path_factory.mktemp("networks"))


class TestRoundTrips(RoundTrips):
    pass
