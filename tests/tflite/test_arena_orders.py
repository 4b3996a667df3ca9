"""Orders of least peak: against every order, tried one by one."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geutil.errors import PlanError
from geutil.tflite.arena_orders import all_orders, least_arena, least_peak
from geutil.tflite.interpreter import (
    ArenaBuffer,
    ArenaProgram,
    Value,
    alive_bytes,
    arena_bytes,
    greedy_offsets,
)
from tests.thorough import examples


@st.composite
def programs(draw, most=7):
    """Programs whose values are read by later operations, some by none."""
    count = draw(st.integers(1, most))
    values = []
    for maker in [-1, *range(count)]:
        for _ in range(draw(st.integers(0, 2))):
            users = draw(st.sets(st.integers(maker + 1, count), max_size=3))
            users = tuple(sorted(u for u in users if u < count))
            values.append(
                Value(draw(st.integers(0, 9)), maker, users, draw(st.booleans()))
            )
    temporaries = draw(
        st.lists(st.lists(st.integers(0, 9), max_size=2), max_size=count)
    )
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))
    after = [p for p in draw(st.lists(pairs, max_size=3)) if p[0] < p[1]]
    return ArenaProgram(count, values, temporaries, after)


def orders(program):
    """Every order, from the definition."""
    for order in permutations(range(program.count)):
        place = {i: step for step, i in enumerate(order)}
        if all(place[a] < place[b] for a, b in program.after) and all(
            value.maker < 0 or place[value.maker] < place[user]
            for value in program.values
            for user in value.users
        ):
            yield list(order)


def peak(program, order):
    """The most bytes alive, counted step by step."""
    most = 0
    for step, i in enumerate(order):
        ran, now = set(order[:step]), set(order[: step + 1])
        bytes_ = sum(program.temporaries[i]) if i < len(program.temporaries) else 0
        for value in program.values:
            used_before = value.users and ran.issuperset(value.users)
            if value.maker < 0:
                is_alive = value.is_kept or (value.users and not used_before)
            else:
                is_over = used_before or (not value.users and value.maker in ran)
                is_alive = value.maker in now and (value.is_kept or not is_over)
            bytes_ += value.size * bool(is_alive)
        most = max(most, bytes_)
    return most


@given(programs())
@examples(150)
def test_the_least_peak_of_every_order(program):
    every = list(orders(program))
    found = least_peak(program)
    assert found.order in every
    assert found.peak == peak(program, found.order) == program.peak(found.order)
    assert found.peak == found.bound == min(peak(program, o) for o in every)


@given(programs(), st.integers(0, 3))
@examples(100)
def test_a_bound_holds_and_nothing_is_worse_however_short_the_search(program, states):
    found = least_peak(program, iterations=states)
    least = min(peak(program, o) for o in orders(program))
    assert found.bound <= least <= found.peak <= program.peak(range(program.count))


@given(programs(most=5))
@examples(100)
def test_all_orders(program):
    every = list(orders(program))
    found = all_orders(program, len(every))
    assert sorted(found) == sorted(every)
    assert all_orders(program, len(every) - 1) is None


@given(programs(most=6), st.integers(0, 30))
@examples(100)
def test_the_least_arena(program, tries):
    def cost(order):
        return (arena_bytes(program.buffers(order), alignment=4),)

    every = list(orders(program))
    least = min(map(cost, every))
    own = list(range(program.count))
    found = least_arena(program, cost, [own], enough=0, tries=tries)
    assert found.order in every
    assert least <= cost(found.order) <= cost(own)
    assert not found.is_least or cost(found.order) == least
    assert found.is_least or len(every) > tries


buffers = st.lists(
    st.builds(
        lambda first, more, *rest: ArenaBuffer(first, first + more, *rest),
        st.integers(0, 9),
        st.integers(0, 5),
        st.integers(0, 99),
        st.booleans(),
    ),
    max_size=12,
)


@given(buffers, st.sampled_from([1, 16, 64]), st.sampled_from(["tightest", "first"]))
@examples(200)
def test_offsets_keep_apart_what_is_alive_at_once(buffers, alignment, fit):
    offsets = greedy_offsets(buffers, alignment=alignment, fit=fit)
    for i, a in enumerate(buffers):
        assert offsets[i] % alignment == 0
        for j, b in enumerate(buffers[:i]):
            if a.first <= b.last and b.first <= a.last and a.size and b.size:
                ends = (offsets[i] + a.size, offsets[j] + b.size)
                assert ends[0] <= offsets[j] or ends[1] <= offsets[i]
    arena = arena_bytes(buffers, alignment=alignment, fit=fit)
    assert arena >= max(alive_bytes(buffers, 15))


def test_a_chain_needs_no_search():
    count = 2000
    values = [Value(i % 7, i, (i + 1,)) for i in range(count - 1)]
    found = least_peak(ArenaProgram(count, values))
    assert found.peak == found.bound
    assert not found.states


@pytest.mark.parametrize("branches", [6, 30])
def test_branches_run_one_after_the_other(branches):
    # Each widens before it narrows; in the order of the program, all widen first.
    values, end = [], 3 * branches
    for i in range(branches):
        values += [Value(100, i, (branches + i,))]
        values += [Value(50, branches + i, (2 * branches + i,))]
        values += [Value(1, 2 * branches + i, (end,))]
    program = ArenaProgram(end + 1, values)
    found = least_peak(program, iterations=2_000)
    assert program.peak(range(program.count)) == 100 * branches + 50
    assert found.peak == 150 + branches - 1
    # As many sets of branches as there are cannot all be looked at.
    assert found.bound == found.peak or branches > 10


def test_an_order_that_cannot_run_is_refused():
    with pytest.raises(PlanError, match="operation 0 runs before 1"):
        ArenaProgram(2, [Value(1, 1, (0,))])
