"""What `make test` leaves to `make test-all`.

`make test` runs `-m "not thorough"`. What is marked is more of the same: values that
meet in another way, draws of Hypothesis beyond the first, processes and pages that
repeat what other tests show. `make test-all` runs all.
"""

import collections
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import hypothesis
import pytest

QUICK = "not thorough"
"""The expression that leaves out what is marked."""
thorough = pytest.mark.thorough
_Row = tuple[int, ...]
_quick = False


def select(expression: str) -> None:
    """Take note of the expression that tests are selected by."""
    global _quick  # noqa: PLW0603
    _quick = QUICK in expression
    # The same examples in each run; other ones are looked for by `make test-all`. How
    # long one takes is the load's business.
    hypothesis.settings.register_profile("untimed", derandomize=_quick, deadline=None)
    hypothesis.settings.load_profile("untimed")


def is_quick() -> bool:
    """Tell whether thorough tests are left out."""
    return _quick


def examples(most: int, **options: Any) -> hypothesis.settings:
    """Return settings with so many examples, or, where it has to be quick, a few."""
    count = max(most // 5, min(most, 5)) if is_quick() else most
    return hypothesis.settings(max_examples=count, deadline=None, **options)


def length(most: int) -> int:
    """Return how long a chain is to be: so long, or, where it has to be quick, less.

    Never so little that a recursion would find room on Python's stack.
    """
    return max(most // 20, min(most, 5_000)) if is_quick() else most


def crossed(*lists: Iterable[Any], together: int = 2) -> list[Any]:
    """Return the product of lists as parameters, all but a covering part thorough.

    The part has every pair of values that two lists offer; with `together=1` every
    value, with 3 every three. It is the same in each run.
    """
    values = [list(one) for one in lists]
    quick = set(covering([len(one) for one in values], together))
    return [
        pytest.param(
            *(one[place] for one, place in zip(values, row, strict=True)),
            marks=[] if row in quick else [thorough],
        )
        for row in itertools.product(*(range(len(one)) for one in values))
    ]


def some(values: Iterable[Any], count: int) -> list[Any]:
    """Return values as parameters, all but so many of them, evenly spread, thorough."""
    listed = list(values)
    last = max(count - 1, 1)
    quick = {i * (len(listed) - 1) // last for i in range(count)}
    return [
        pytest.param(value, marks=[] if place in quick else [thorough])
        for place, value in enumerate(listed)
    ]


def chosen(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Return values as parameters, all but the given ones thorough."""
    listed = list(values)
    assert all(value in listed for value in quick)
    return [
        pytest.param(value, marks=[] if value in quick else [thorough])
        for value in listed
    ]


def covering(sizes: Sequence[int], together: int) -> list[_Row]:
    """Return rows in which values of any so many columns meet in every way.

    Greedy, so it is not always the smallest such part: each row is the first of those
    that bring most of what is missing, by values that are in few rows so far.
    """
    columns = list(itertools.combinations(range(len(sizes)), min(together, len(sizes))))
    rows = {
        row: {(chosen, tuple(row[c] for c in chosen)) for chosen in columns}
        for row in itertools.product(*map(range, sizes))
    }
    missing = set().union(*rows.values())
    used: collections.Counter[tuple[int, int]] = collections.Counter()

    def worth(row: _Row) -> tuple[int, int]:
        seen = sum(used[place] for place in enumerate(row))
        return len(rows[row] & missing), -seen

    result = []
    while missing:
        best = max(rows, key=worth)
        result.append(best)
        missing -= rows[best]
        used.update(enumerate(best))
    return result
