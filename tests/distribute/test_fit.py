"""`model.fit` of checkpointed models under strategies."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.processes import run_python
from tests.settings import needs_eager

pytestmark = needs_eager


@functools.cache
def fitted(kind, edit):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "numbers.npz"
        done = run_python("-m", "tests.distribute.fit_steps", kind, edit, file)
        assert done.returncode == 0, done.stderr.decode()[-3000:]
        return dict(np.load(file))


def assert_close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if key != "recomputed":
            size = max(np.abs(value).max(), 1e-3)
            np.testing.assert_allclose(
                found[key], value, rtol=0, atol=tolerance * size, err_msg=key
            )


@pytest.mark.parametrize("edit", ["checkpointed", "checkpointed inputs"])
def test_fit_on_two_devices_equals_fit_on_one(edit):
    found = fitted("two", edit)
    assert found["recomputed"]
    # Rounding adds up over eight steps: of plain fit to 1.6e-6.
    assert_close(found, fitted("one", "plain"), 5e-6)
    assert_close(fitted("two", "plain"), fitted("one", "plain"), 5e-6)


@pytest.mark.parametrize("norms", ["", " norms"])
def test_checkpointed_fit_equals_plain_fit(norms):
    """Norms take the statistics of their replica in both."""
    found = fitted("two", f"checkpointed{norms}")
    assert found["recomputed"]
    assert_close(found, fitted("two", f"plain{norms}"), 2e-6)
