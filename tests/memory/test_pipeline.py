"""Simulated pipelines, against closed forms and a naive clock."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geutil.errors import PlanError
from geutil.memory import Node, Pipeline, Program, Stage, simulate
from tests.memory.refusals import refused


def test_equal_stages_have_the_bubble_of_the_formula():
    for schedule, stages, batches in product(("gpipe", "1f1b"), (1, 2, 5), (1, 3, 8)):
        run = simulate(Pipeline([Stage(1.0, 2.0)] * stages, batches, schedule))
        count = batches + stages - 1
        expected = pytest.approx((3.0 * count, (stages - 1) / count))
        assert (run.seconds, run.bubble) == expected, (schedule, stages, batches)


def test_1f1b_holds_fewer_micro_batches():
    stages = [Stage(1.0, 1.0, kept=10, transient=3, held=100)] * 4
    gpipe = simulate(Pipeline(stages, 8, "gpipe"))
    alternating = simulate(Pipeline(stages, 8, "1f1b"))
    assert gpipe.in_flight == (8, 8, 8, 8)
    assert alternating.in_flight == (4, 3, 2, 1)
    assert gpipe.peaks == (183, 183, 183, 183)
    assert alternating.peaks == (143, 133, 123, 113)
    assert gpipe.peak == 183
    # Fewer micro-batches than stages are all in flight.
    run = simulate(Pipeline([Stage(1.0, 1.0)] * 4, 2))
    assert run.in_flight == (2, 2, 2, 1)


def test_messages_take_time_and_are_counted():
    stages = [Stage(1.0, 1.0, sent=10), Stage(1.0, 1.0)]
    run = simulate(Pipeline(stages, 1, bandwidth=5.0, latency=0.5))
    # Forwards 1, over 2.5, forwards 1, backwards 1, over 2.5, backwards 1.
    assert run.seconds == pytest.approx(9.0)
    assert run.traffic == (20,)
    stages = [Stage(0.0, 0.0, sent=10), Stage(0.0, 0.0)]
    run = simulate(Pipeline(stages, 6, "gpipe", bandwidth=10.0))
    # Six messages one after another, and then six back.
    assert run.seconds == pytest.approx(12.0)


def test_replicas_sum_their_gradients_in_a_ring():
    pipeline = Pipeline(
        [Stage(1.0, 1.0, gradients=80)], 1, bandwidth=10.0, latency=0.1, replicas=4
    )
    run = simulate(pipeline)
    assert pipeline.devices == 4
    assert run.exchanged == (120,)
    assert run.seconds == pytest.approx(2 + 12 + 6 * 0.1)
    # Faster devices take less time.
    stages = [Stage(1.0, 2.0)] * 3
    assert simulate(Pipeline(stages, 4, speed=2.0)).seconds == pytest.approx(9.0)


whole = st.integers(0, 5)
some_stages = st.lists(
    st.builds(Stage, forward=whole, backward=whole, sent=whole), min_size=1, max_size=4
)


@given(some_stages, st.integers(1, 5), st.sampled_from(["gpipe", "1f1b"]))
def test_a_naive_clock_agrees(stages, batches, schedule):
    """Time goes on tick by tick; links are as fast as one wants."""
    pipeline = Pipeline(stages, batches, schedule)
    ready = {(0, m, False): 0.0 for m in range(batches)}
    orders = [pipeline.passes(s) for s in range(len(stages))]
    free = [0.0] * len(stages)
    now = 0.0
    while any(orders):
        ran = False
        for s, order in enumerate(orders):
            if not order or free[s] > now:
                continue
            back, m = order[0]
            if ready.get((s, m, back), float("inf")) > now:
                continue
            del order[0]
            ran = True
            free[s] = now + (stages[s].backward if back else stages[s].forward)
            if back:
                ready[s - 1, m, True] = free[s]
            elif s + 1 < len(stages):
                ready[s + 1, m, False] = free[s]
            else:
                ready[s, m, True] = free[s]
        now += 0 if ran else 1
    assert simulate(pipeline).seconds == pytest.approx(max(free))


def test_what_cannot_run_is_refused():
    for wrong, said in (
        ({"schedule": "2f2b"}, "pass one of gpipe, 1f1b"),
        ({"micro_batches": 0}, "micro_batches is 1 or more"),
        ({"replicas": 0}, "replicas is 1 or more"),
        ({"bandwidth": 0.0}, "bandwidth is above 0"),
        ({"speed": -1.0}, "speed is above 0"),
        ({"stages": []}, "there is no stage"),
    ):
        arguments = {"stages": [Stage(1.0, 1.0)], "micro_batches": 1} | wrong
        with refused(PlanError, said):
            Pipeline(**arguments)


def test_orders_and_seeds_are_those_of_programs():
    pipeline = Pipeline([Stage(1.0, 1.0)], 1)
    with pytest.raises(PlanError, match="order and seed"):
        simulate(pipeline, [0])
    program = Program([Node("x", "Relu", outputs=[0])], [8])
    assert simulate(program, [0]).peak == 8
