"""Edits in functions of a DTensor mesh of two devices, against no mesh."""

from __future__ import annotations

from tests.distribute.programs import results_of
from tests.settings import needs_eager

pytestmark = needs_eager
REFUSED = {
    "memory": "PlanError: the function reads variables of a DTensor mesh",
    "speed": "PlanError: the function reads variables of a DTensor mesh",
    "fold,quantize": "QuantizeError: the function reads variables of a DTensor",
    "train,quantize": "QuantizeError: the function reads variables of a DTensor",
}


def test_folds_on_a_mesh_are_as_near_as_the_unfolded_step():
    results = results_of("mesh", "fold", "train,fold")
    assert [result["reports"][0].splitlines()[0] for result in results] == [
        "2 of 2 batch norm(s) folded, 0 refused"
    ] * 2
    for result in results:
        assert result["plain"] < 1e-4
        assert result["edited"] < 2 * result["plain"]


def test_what_has_no_layout_is_refused_by_name():
    results = results_of("mesh", *REFUSED)
    wrong = {
        edits: result
        for (edits, error), result in zip(REFUSED.items(), results, strict=True)
        if error not in result.get("error", "")
    }
    assert wrong == {}
