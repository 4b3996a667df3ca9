"""What holds for every function that edits, tried on each of them."""

import pytest
import tensorflow as tf

import geutil as ge
from tests.reroute.samples import chains, check_refused, state

EDITS = {
    "swap_ts": lambda g: ge.swap_ts(g.a, g.b),
    "reroute_ts": lambda g: ge.reroute_ts(g.a, g.b),
    "swap_inputs": lambda g: ge.swap_inputs(g.c.op, g.d.op),
    "reroute_inputs": lambda g: ge.reroute_inputs(g.c.op, g.d.op),
    "swap_outputs": lambda g: ge.swap_outputs(g.c.op, g.d.op),
    "reroute_outputs": lambda g: ge.reroute_outputs(g.c.op, g.d.op),
    "swap_ios": lambda g: ge.swap_ios(g.c.op, g.d.op),
    "reroute_ios": lambda g: ge.reroute_ios(g.c.op, g.d.op),
    "add_control_inputs": lambda g: ge.add_control_inputs(g.d.op, g.a.op),
    "remove_control_inputs": lambda g: ge.remove_control_inputs(g.w.op, g.a.op),
    "detach_control_inputs": lambda g: ge.detach_control_inputs(g.w.op),
    "detach_control_outputs": lambda g: ge.detach_control_outputs(
        g.a.op, ge.ControlOutputs(g.graph)
    ),
    "detach_inputs": lambda g: ge.detach_inputs(g.c.op),
    "detach_inputs control": lambda g: ge.detach_inputs([g.d.op, g.w.op], True),
    "detach_outputs": lambda g: ge.detach_outputs(g.c.op),
    "detach_outputs control": lambda g: ge.detach_outputs(
        g.a.op, ge.ControlOutputs(g.graph)
    ),
    "detach": lambda g: ge.detach(g.c.op),
    "detach control": lambda g: ge.detach(
        [g.a.op, g.c.op], control_ios=ge.ControlOutputs(g.graph)
    ),
    "connect": lambda g: ge.connect(g.c.op, g.f.op),
    "connect first": lambda g: ge.connect(g.c.op, g.f.op, disconnect_first=True),
    "bypass": lambda g: ge.bypass(g.c.op),
}


@pytest.fixture(params=EDITS)
def edit(request):
    return EDITS[request.param]


def test_is_accepted_and_keeps_the_invariants(setting, edit):
    def body():
        g = chains()
        before = state(g.graph)
        edit(g)
        assert state(g.graph)[0] != before[0]
        ge.verify(g.graph)

    setting.run(body)


def test_is_refused_on_a_finalized_graph(setting, edit):
    def body():
        g = chains()
        g.graph.finalize()
        try:
            check_refused(
                g.graph,
                lambda: edit(g),
                ge.FinalizedGraphError,
                ["finalized", "geutil.copy"],
            )
        finally:
            # The end of tracing adds to the graph.
            g.graph._unsafe_unfinalize()

    setting.run(body)


def test_is_refused_after_a_session_has_run(edit):
    with tf.Graph().as_default() as graph:
        g = chains()
        with tf.compat.v1.Session() as session:
            session.run(g.e)
            error = check_refused(
                graph,
                lambda: edit(g),
                ge.StaleGraphError,
                ["Session", "geutil.allow_stale(graph)", "op '"],
            )
            ops = [op.name for op in graph.get_operations()]
            assert str(error).split("op '")[1].split("'")[0] in ops
        # The Session is closed: nobody is misled any more.
        edit(g)
        ge.verify(graph)


def test_is_let_through_by_allow_stale(edit):
    with tf.Graph().as_default() as graph:
        g = chains()
        with tf.compat.v1.Session() as session:
            session.run(g.e)
            with ge.allow_stale(graph):
                edit(g)
        ge.verify(graph)


def test_is_refused_once_the_function_is_built(edit):
    kept = []

    @tf.function(autograph=False)
    def traced():
        kept.append(chains())
        return kept[0].e

    traced.get_concrete_function()
    g = kept[0]
    check_refused(
        g.graph,
        lambda: edit(g),
        ge.StaleGraphError,
        ["function", "traced", "geutil.copy", "geutil.allow_stale(graph)"],
    )
    with ge.allow_stale(g.graph):
        edit(g)


def test_is_undone_by_an_aborted_transaction(setting, edit):
    def body():
        g = chains()
        before = state(g.graph)[0]
        with pytest.raises(KeyError), ge.transaction(g.graph):
            edit(g)
            assert state(g.graph)[0] != before
            raise KeyError
        after = state(g.graph)[0]
        # Placeholders stay: TensorFlow cannot delete an op. Nobody reads them.
        assert {name: after[name] for name in before} == before
        new = set(after) - set(before)
        assert all("geph__" in name for name in new)
        ge.verify(g.graph)

    setting.run(body)


# Some edits touch ops that a Session has seen and ops that it has not: the refusal must
# come before a placeholder is made for the latter.


def seen_and_new(session):
    """Run c and d; then make new and newer, which reads it, and w, which waits."""
    g = chains()
    session.run([g.e, g.f, g.w])
    g.new = tf.abs(g.a, name="new")
    g.newer = tf.sigmoid(g.new, name="newer")
    return g


@pytest.mark.parametrize(
    "call",
    [
        lambda g: ge.connect(g.new.op, g.d.op, disconnect_first=True),
        lambda g: ge.detach_inputs([g.new.op, g.w.op], control_inputs=True),
        lambda g: ge.detach([g.new.op, g.w.op], control_inputs=True),
        lambda g: ge.detach_outputs(
            ge.sgv(g.new.op, g.a.op).remap_outputs([0]), ge.ControlOutputs(g.graph)
        ),
    ],
)
def test_a_refusal_halfway_leaves_no_placeholder(call):
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
        g = seen_and_new(session)
        check_refused(graph, lambda: call(g), ge.StaleGraphError)


def test_a_refused_bypass_leaves_no_placeholder():
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
        g = seen_and_new(session)
        with ge.allow_stale(graph):
            ge.reroute_ts(g.new, g.c, can_modify=g.e.op)
        # e, which the Session has seen, reads new, which it has not.
        check_refused(graph, lambda: ge.bypass(g.new.op), ge.StaleGraphError, ["'e'"])
