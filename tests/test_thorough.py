"""What the quick tests have of a product, and that the whole has all of it."""

import itertools
import re
import sys
from pathlib import Path

import pytest

from tests import thorough

ROOT = Path(__file__).parents[1]
LISTS = [
    ["ab", "cd"],
    ["ab", "cde"],
    ["abc", "de", "fghi"],
    ["abcdefgh", "ijk", "lm", "no", "p"],
]


def quick(params):
    return [tuple(p.values) for p in params if not p.marks]


@pytest.mark.parametrize("lists", LISTS, ids="-".join)
def test_the_whole_is_the_product(lists):
    found = [tuple(p.values) for p in thorough.crossed(*lists)]
    assert found == list(itertools.product(*lists))


@pytest.mark.parametrize("together", [1, 2, 3])
@pytest.mark.parametrize("lists", LISTS, ids="-".join)
def test_values_meet_in_the_quick_part(lists, together):
    rows = quick(thorough.crossed(*lists, together=together))
    for columns in itertools.combinations(range(len(lists)), min(together, len(lists))):
        met = {tuple(row[c] for c in columns) for row in rows}
        assert met == set(itertools.product(*(lists[c] for c in columns)))
    # None of them is for nothing.
    assert len(rows) == len(set(rows)) <= len(list(itertools.product(*lists)))


def test_pairs_are_far_fewer_than_all():
    rows = quick(thorough.crossed(*["abcd"] * 5))
    assert 16 <= len(rows) <= 30


def test_the_quick_part_is_the_same_each_time():
    made = [thorough.crossed("abc", "defg", range(5)) for _ in range(2)]
    assert quick(made[0]) == quick(made[1])


def test_one_list_is_quick_as_a_whole():
    assert quick(thorough.crossed("abc")) == [("a",), ("b",), ("c",)]


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, [0]), (2, [0, 9]), (4, [0, 3, 6, 9]), (10, [*range(10)])],
)
def test_some_are_spread_over_all(count, expected):
    params = thorough.some(range(10), count)
    assert [p.values[0] for p in params] == list(range(10))
    assert [value for (value,) in quick(params)] == expected


def test_what_is_chosen_is_quick():
    params = thorough.chosen({"a": 1, "b": 2, "c": 3}, "c", "a")
    assert [p.values for p in params] == [("a",), ("b",), ("c",)]
    assert quick(params) == [("a",), ("c",)]
    with pytest.raises(AssertionError):
        thorough.chosen("abc", "d")


def test_few_examples_and_short_chains_where_it_has_to_be_quick(monkeypatch):
    counts, lengths = {}, {}
    for expression in ("", "smoke", thorough.QUICK, f"smoke and {thorough.QUICK}"):
        monkeypatch.setattr(thorough, "_quick", False)
        thorough.select(expression)
        counts[expression] = [thorough.examples(n).max_examples for n in (3, 40, 150)]
        lengths[expression] = [thorough.length(n) for n in (300, 20_000, 200_000)]
    everything, *_ = counts.values()
    assert everything == [3, 40, 150]
    assert list(counts.values()) == [everything] * 2 + [[3, 8, 30]] * 2
    everything, *_ = lengths.values()
    assert everything == [300, 20_000, 200_000]
    assert list(lengths.values()) == [everything] * 2 + [[300, 5_000, 10_000]] * 2
    assert sys.getrecursionlimit() < 5_000


def test_make_selects_by_the_same_expression():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf'-m "{thorough.QUICK}"', text)
