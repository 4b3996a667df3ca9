from geutil.reroute.tensors import ReroutePlan, may_modify
from tests.graph.building import snapshot
from tests.reroute.samples import inputs, wires
from tests.settings import in_each_setting


def edges(plan, t):
    return [(op.name, index) for op, index in plan.edges_reading(t)]


def everything(op):
    return True


@in_each_setting
def test_a_step_sees_the_steps_before_it():
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


@in_each_setting
def test_steps_that_cancel_out_close_no_cycle():
    g = wires()
    before = snapshot(g.graph)[0]
    plan = ReroutePlan(g.graph)
    plan.set_input((g.u.op, 0), g.u)
    plan.set_input((g.u.op, 0), g.c)
    plan.apply()
    assert snapshot(g.graph)[0] == before
