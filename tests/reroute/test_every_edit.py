"""What holds for every function that edits, tried on each of them."""

import pytest
import tensorflow as tf

import geutil as ge
from geutil.reroute.tensors import ReroutePlan
from tests.graph.building import snapshot
from tests.reroute.samples import chains
from tests.select import tables
from tests.select.tables import check_refused
from tests.settings import in_each_setting, names

EDITS = {
    "swap_ts": lambda g: ge.swap_ts(g.a, g.b),
    "reroute_ts": lambda g: ge.reroute_ts(g.a, g.b),
    "swap_inputs": lambda g: ge.swap_inputs(g.view_c, g.view_d),
    "reroute_inputs": lambda g: ge.reroute_inputs(g.view_c, g.view_d),
    "swap_outputs": lambda g: ge.swap_outputs(g.view_c, g.view_d),
    "reroute_outputs": lambda g: ge.reroute_outputs(g.view_c, g.view_d),
    "swap_ios": lambda g: ge.swap_ios(g.view_c, g.view_d),
    "reroute_ios": lambda g: ge.reroute_ios(g.view_c, g.view_d),
    "add_control_inputs": lambda g: ge.add_control_inputs(g.d.op, g.a.op),
    "remove_control_inputs": lambda g: ge.remove_control_inputs(g.w.op, g.a.op),
    "detach_control_inputs": lambda g: ge.detach_control_inputs(g.w.op),
    "detach_control_outputs": lambda g: ge.detach_control_outputs(
        g.a.op, ge.ControlOutputs(g.graph)
    ),
    "detach_inputs": lambda g: ge.detach_inputs(g.view_c),
    "detach_inputs control": lambda g: ge.detach_inputs([g.d.op, g.w.op], True),
    "detach_outputs": lambda g: ge.detach_outputs(g.view_c),
    "detach_outputs control": lambda g: ge.detach_outputs(
        g.a.op, ge.ControlOutputs(g.graph)
    ),
    "detach": lambda g: ge.detach(g.view_c),
    "detach control": lambda g: ge.detach(
        [g.a.op, g.c.op], control_ios=ge.ControlOutputs(g.graph)
    ),
    "connect": lambda g: ge.connect(g.c.op, g.view_f),
    "connect first": lambda g: ge.connect(g.c.op, g.view_f, disconnect_first=True),
    "bypass": lambda g: ge.bypass(g.view_c),
}


def sample():
    """Return chains, and views of some of their ops, two of which pass x on."""
    g = chains()
    x = tf.constant([1.0, 2.0], name="x")
    tf.add(x, x, name="reads_x")
    g.view_c, g.view_d = ge.sgv(g.c.op, x), ge.sgv(g.d.op, x)
    g.view_f = ge.sgv(g.f.op)
    return g


def contents(g):
    """Return the names of what is in the views."""
    parts = [
        (v.ops, v.inputs, v.outputs, v.passthroughs)
        for v in (g.view_c, g.view_d, g.view_f)
    ]
    return [[names(part) for part in view] for view in parts]


def check_each(check):
    """Call `check` with each edit, and fail with the names of all that it fails for."""
    tables.check_rows(
        "\n".join(f"{name} =>" for name in EDITS), lambda name, _: check(EDITS[name])
    )


def test_is_accepted_keeps_the_invariants_and_is_undone_by_an_abort(setting):
    def check(edit):
        def body():
            g = sample()
            before, held = snapshot(g.graph)[0], contents(g)
            with pytest.raises(KeyError), ge.transaction(g.graph):
                edit(g)
                assert snapshot(g.graph)[0] != before
                raise KeyError
            after = snapshot(g.graph)[0]
            # Placeholders stay: TensorFlow cannot delete an op. Nobody reads them.
            assert {name: after[name] for name in before} == before
            assert contents(g) == held
            new = set(after) - set(before)
            assert all("geph__" in name for name in new)
            ge.verify(g.graph)
            edit(g)
            assert snapshot(g.graph)[0] != before
            ge.verify(g.graph)

        setting.run(body)

    check_each(check)


@in_each_setting
def test_is_refused_on_a_finalized_graph():
    g = sample()
    g.graph.finalize()
    words = ["finalized", "geutil.copy"]
    try:
        check_each(
            lambda edit: check_refused(
                g.graph, lambda: edit(g), ge.FinalizedGraphError, words
            )
        )
    finally:
        # The end of tracing adds to the graph.
        g.graph._unsafe_unfinalize()


def test_is_refused_while_a_session_is_open_that_has_run():
    with tf.Graph().as_default() as graph:
        g = sample()
        ops = [op.name for op in graph.get_operations()]

        def check(edit):
            words = ["Session", "geutil.allow_stale(graph)", "op '"]
            error = check_refused(graph, lambda: edit(g), ge.StaleGraphError, words)
            assert str(error).split("op '")[1].split("'")[0] in ops

        with tf.compat.v1.Session() as session:
            session.run(g.e)
            check_each(check)

    def check_let_through(edit):
        with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
            g = sample()
            session.run(g.e)
            with ge.allow_stale(graph):
                edit(g)
            ge.verify(graph)
        with tf.Graph().as_default() as graph:
            g = sample()
            with tf.compat.v1.Session() as session:
                session.run(g.e)
            # The Session is closed: nobody is misled any more.
            edit(g)
            ge.verify(graph)

    check_each(check_let_through)


def built():
    """Return a sample in the graph of a function that is built."""
    kept = []

    @tf.function(autograph=False)
    def traced():
        kept.append(sample())
        return kept[0].e

    traced.get_concrete_function()
    return kept[0]


def test_is_refused_once_the_function_is_built():
    def check(edit):
        g = built()
        words = ["function", "traced", "geutil.copy", "geutil.allow_stale(graph)"]
        check_refused(g.graph, lambda: edit(g), ge.StaleGraphError, words)
        with ge.allow_stale(g.graph):
            edit(g)

    check_each(check)


@in_each_setting
def test_steps_that_cancel_out_close_no_cycle():
    g = chains()
    before = snapshot(g.graph)[0]
    plan = ReroutePlan(g.graph)
    plan.set_input((g.c.op, 0), g.c)
    plan.set_input((g.c.op, 0), g.a)
    plan.apply()
    assert snapshot(g.graph)[0] == before


# Some edits touch ops that a Session has seen and ops that it has not: the refusal must
# come before a placeholder is made for the latter.


def seen_and_new(session):
    """Run c and d; then make new and newer, which reads it, and w, which waits."""
    g = chains()
    session.run([g.e, g.f, g.w])
    g.new = tf.abs(g.a, name="new")
    g.newer = tf.sigmoid(g.new, name="newer")
    return g


HALFWAY = """
ge.connect(new.op, d.op, disconnect_first=True) => StaleGraphError
ge.detach_inputs([new.op, w.op], control_inputs=True) => StaleGraphError
ge.detach([new.op, w.op], control_inputs=True) => StaleGraphError
ge.detach_outputs(ge.sgv(new.op, a.op).remap_outputs([0]), controls) => StaleGraphError
"""


def test_a_refusal_halfway_leaves_no_placeholder():
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
        g = seen_and_new(session)
        tables.check_refusals(HALFWAY, g)
        with ge.allow_stale(graph):
            ge.reroute_ts(g.new, g.c, can_modify=g.e.op)
        # e, which the Session has seen, reads new, which it has not.
        check_refused(graph, lambda: ge.bypass(g.new.op), ge.StaleGraphError, ["'e'"])
