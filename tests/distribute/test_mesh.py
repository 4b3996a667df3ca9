"""Edits in functions of a DTensor mesh of two devices, against no mesh."""

from __future__ import annotations

import pytest

from tests.processes import run_python
from tests.settings import needs_eager

pytestmark = needs_eager


def stepped(edits):
    return run_python("-m", "tests.distribute.mesh", edits)


@pytest.mark.parametrize("edits", ["fold", "train,fold"])
def test_folds_on_a_mesh_are_as_near_as_the_unfolded_step(edits):
    done = stepped(edits)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    *printed, last = done.stdout.decode().splitlines()
    assert "4 of 4 batch norm(s) folded, 0 refused" in printed
    folded, plain = map(float, last.split())
    assert plain < 1e-4
    assert folded < 2 * plain


@pytest.mark.parametrize(
    ("edits", "error"),
    [
        ("memory", "PlanError: the function reads variables of a DTensor mesh"),
        ("speed", "PlanError: the function reads variables of a DTensor mesh"),
        ("fold,quantize", "QuantizeError: the function reads variables of a DTensor"),
        ("train,quantize", "QuantizeError: the function reads variables of a DTensor"),
    ],
)
def test_what_has_no_layout_is_refused_by_name(edits, error):
    done = stepped(edits)
    assert done.returncode == 1
    assert error in done.stderr.decode()
