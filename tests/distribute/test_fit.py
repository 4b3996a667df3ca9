"""`model.fit` of checkpointed models under strategies."""

from __future__ import annotations

import numpy as np
import pytest

from tests.distribute.programs import results_of
from tests.settings import needs_eager

pytestmark = needs_eager


@pytest.mark.parametrize(
    ("plain", "edited", "tolerance"),
    [
        # Rounding adds up over eight steps: of plain fit to 1.6e-6.
        ("one plain", "two checkpointed inputs", 5e-6),
        # Norms take the statistics of their replica in both.
        ("two plain norms", "two checkpointed norms", 2e-6),
    ],
)
def test_checkpointed_fit_on_two_devices_equals_plain_fit(plain, edited, tolerance):
    expected, found = results_of("fit_steps", plain, edited)
    assert found.pop("recomputed")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        size = max(np.abs(value).max(), 1e-3)
        np.testing.assert_allclose(
            found[key], value, rtol=0, atol=tolerance * size, err_msg=key
        )
