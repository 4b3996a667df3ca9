"""Edits in functions of a DTensor mesh of two devices, against no mesh."""

from tests.distribute.programs import results_of
from tests.settings import needs_eager

pytestmark = needs_eager
REFUSED = {
    "memory": "PlanError: the function reads variables of a DTensor mesh",
    "speed": "PlanError: the function reads variables of a DTensor mesh",
    "fold,quantize": "QuantizeError: the function reads variables of a DTensor",
    "train,quantize": "QuantizeError: the function reads variables of a DTensor",
}


def test_folds_are_near_the_unfolded_step_and_what_has_no_layout_is_refused():
    folds = ("fold", "train,fold")
    results = dict(
        zip((*folds, *REFUSED), results_of("mesh", *folds, *REFUSED), strict=True)
    )
    for edits in folds:
        result = results[edits]
        head = result["reports"][0].splitlines()[0]
        assert head == "2 of 2 batch norm(s) folded, 0 refused", edits
        assert result["plain"] < 1e-4
        assert result["edited"] < 2 * result["plain"]
    wrong = {
        edits: results[edits]
        for edits, error in REFUSED.items()
        if error not in results[edits].get("error", "")
    }
    assert wrong == {}
