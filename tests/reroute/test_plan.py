import pytest
import tensorflow as tf

import geutil as ge
from geutil.reroute.tensors import ReroutePlan, may_modify
from tests.reroute.samples import chains, inputs, wires
from tests.select import tables
from tests.select.tables import state
from tests.settings import names


def edges(plan, t):
    return [(op.name, index) for op, index in plan.edges_reading(t)]


def everything(op):
    return True


def test_nothing_changes_before_apply(setting):
    def body():
        g = wires()
        before = state(g.graph)
        plan = ReroutePlan(g.graph)
        assert plan.redirect(([(g.a, g.b)], everything)) == 4
        plan.set_control_inputs(g.s.op, [g.c.op])
        assert state(g.graph) == before
        plan.apply()
        assert inputs(g.p, g.q, g.r) == [["b:0"] * 2] * 3
        assert names(g.s.op.control_inputs) == ["c"]

    setting.run(body)


def test_a_step_sees_the_steps_before_it(setting):
    def body():
        g = wires()
        plan = ReroutePlan(g.graph)
        assert edges(plan, g.c) == [("u", 0)]
        assert edges(plan, g.a) == [("p", 0), ("q", 1), ("r", 0), ("r", 1)]
        assert edges(plan, g.p) == []
        assert plan.redirect(([(g.b, g.c)], everything)) == 3
        assert edges(plan, g.b) == []
        assert sorted(edges(plan, g.c)) == [("p", 1), ("q", 0), ("s", 0), ("u", 0)]
        assert plan.redirect(([(g.c, g.a)], may_modify(None, [g.u.op]))) == 3
        assert edges(plan, g.c) == [("u", 0)]
        plan.apply()
        assert inputs(g.p, g.q, g.s, g.u) == [
            ["a:0", "a:0"],
            ["a:0", "a:0"],
            ["a:0"],
            ["c:0"],
        ]

    setting.run(body)


def test_control_inputs(setting):
    def body():
        g = chains()
        plan = ReroutePlan(g.graph)
        assert names(plan.control_inputs(g.w.op)) == ["a"]
        plan.set_control_inputs(g.w.op, [g.a.op, g.b.op, g.c.op])
        plan.drop_control_inputs(g.w.op, [g.a.op, g.d.op])
        assert names(plan.control_inputs(g.w.op)) == ["b", "c"]
        assert names(g.w.op.control_inputs) == ["a"]
        plan.apply()
        assert sorted(names(g.w.op.control_inputs)) == ["b", "c"]

    setting.run(body)


def test_steps_that_cancel_out_close_no_cycle(setting):
    def body():
        g = wires()
        before = state(g.graph)[0]
        plan = ReroutePlan(g.graph)
        plan.set_input((g.u.op, 0), g.u)
        plan.set_input((g.u.op, 0), g.c)
        plan.apply()
        assert state(g.graph)[0] == before

    setting.run(body)


def test_a_refused_plan_applies_none_of_its_steps(setting):
    def body():
        g = wires()
        before = state(g.graph)
        plan = ReroutePlan(g.graph)
        plan.redirect(([(g.a, g.b)], everything))
        plan.set_control_inputs(g.s.op, [g.c.op])
        plan.set_input((g.u.op, 0), g.u)
        with pytest.raises(ge.CycleError):
            plan.apply()
        assert state(g.graph) == before

    setting.run(body)


def test_an_empty_plan_needs_no_graph():
    ReroutePlan(None).apply()


LIMITS = """
may_modify() => p q r
may_modify(can_modify=None) => p q r
may_modify(can_modify=[]) =>
may_modify(can_modify=[p.op, q.op]) => p q
may_modify(cannot_modify=[p.op]) => q r
may_modify(cannot_modify=[]) => p q r
may_modify(can_modify=[p.op, q.op], cannot_modify=[q.op]) => p
"""


def test_may_modify():
    def check(call, expected):
        may = tables.evaluate(call, g, may_modify=may_modify)
        found = [t.op.name for t in (g.p, g.q, g.r) if may(t.op)]
        assert found == expected.split(), found

    with tf.Graph().as_default():
        g = wires()
        tables.check_rows(LIMITS, check)
