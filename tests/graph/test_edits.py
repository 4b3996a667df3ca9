"""Plan, check, apply, undo."""

import contextlib
import itertools
import sys

import pytest
import tensorflow as tf

import geutil as ge
from geutil.graph import edits
from geutil.graph.edits import ControlEdit, InputEdit, apply_edits
from geutil.graph.state import state_of
from tests import settings
from tests.graph.building import snapshot


class StopError(Exception):
    """What goes wrong in a block."""


class Line:
    """a -> b -> c -> d, and x and i (an integer) beside it; d waits for x."""

    def __init__(self, graph=None):
        with (graph or tf.Graph()).as_default() as self.graph:
            self.x = tf.constant(5.0, name="x")
            self.i = tf.constant(7, name="i")
            self.a = tf.constant(1.0, name="a")
            self.b = tf.negative(self.a, name="b")
            self.c = tf.negative(self.b, name="c")
            with tf.control_dependencies([self.x]):
                self.d = tf.negative(self.c, name="d")

    def reads(self):
        return [t.op.inputs[0].op.name for t in (self.b, self.c, self.d)]


@pytest.fixture
def line():
    return Line()


# -- refusals leave the graph as it was ------------------------------------------------


def test_a_cycle_is_refused_and_nothing_changes(line):
    """Either edit alone is fine; see also the properties of test_order.py."""
    before = snapshot(line.graph)
    inputs = [InputEdit(line.d.op, 0, line.x)]
    controls = [ControlEdit(line.x.op, (line.d.op,))]
    with pytest.raises(ge.CycleError, match=r"^the edit would close a cycle: \w+ -> "):
        apply_edits(line.graph, inputs, controls)
    assert snapshot(line.graph) == before


def control_orders(graph):
    """Return what each op waits for, in order, as Python and its definition have it."""
    return {
        op.name: (
            settings.names(op.control_inputs),
            [name for name in op.node_def.input if name.startswith("^")],
        )
        for op in graph.get_operations()
    }


def failing_once(patch, method, call, *, early):
    """Let one call of a method of ops fail, before or after its work."""
    original = getattr(tf.Operation, method)
    calls = []

    def wrapper(self, *args):
        calls.append(self)
        if early and len(calls) == call:
            raise StopError
        original(self, *args)
        if len(calls) == call:
            raise StopError

    patch.setattr(tf.Operation, method, wrapper)
    return calls


def test_an_edit_that_fails_halfway_is_undone(line, monkeypatch):
    with line.graph.as_default(), tf.control_dependencies([line.d, line.i, line.c]):
        e, f = tf.add(line.a, line.x, name="e"), tf.negative(line.a, name="f")
    before, orders = snapshot(line.graph), control_orders(line.graph)
    inputs = [InputEdit(e.op, 0, line.x), InputEdit(f.op, 0, line.b)]
    waited = (line.x.op, line.c.op)
    controls = [ControlEdit(e.op, waited), ControlEdit(f.op, waited)]
    methods = "_update_input", "_remove_all_control_inputs", "_add_control_inputs"
    blocks = (lambda graph: contextlib.nullcontext()), ge.transaction
    for case in itertools.product(methods, (1, 2), (True, False), blocks):
        method, call, early, block = case
        with monkeypatch.context() as patch, block(line.graph):
            calls = failing_once(patch, method, call, early=early)
            with pytest.raises(StopError):
                apply_edits(line.graph, inputs, controls)
            assert len(calls) >= call
            assert control_orders(line.graph) == orders, case
        assert snapshot(line.graph) == before, case
    # The order is mended too: what was legal stays legal, and what was not, not.
    with pytest.raises(ge.CycleError):
        ge.reroute_ts(line.d, line.a)
    assert ge.reroute_ts(line.a, line.b) == 1


def test_an_interrupt_while_an_edit_ends_undoes_it_in_a_transaction():
    # At each line that begins to be run in the bookkeeping of the edit.
    for place in range(12):
        line = Line()
        before = snapshot(line.graph)
        left = [place]

        def trace(frame, event, _, left=left):
            if frame.f_code.co_name != "_journal":
                return None if frame.f_code.co_filename != edits.__file__ else trace
            if event == "line":
                left[0] -= 1
                if left[0] < 0:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        tracer = sys.gettrace()
        try:
            with ge.transaction(line.graph):
                sys.settrace(trace)
                ge.reroute_ts(line.x, line.a)
                sys.settrace(None)
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(tracer)
        assert snapshot(line.graph) == before, place
        assert not any(state_of(line.graph).journals.values())


def test_what_cannot_be_undone_is_told_and_the_rest_undone(line, monkeypatch, caplog):
    def broken(*_):
        raise OSError("out of edges")

    with pytest.raises(StopError), ge.transaction(line.graph):
        ge.reroute_ts(line.x, line.a)
        ge.remove_control_inputs(line.d.op, line.x.op)
        monkeypatch.setattr(tf.Operation, "_add_control_inputs", broken)
        raise StopError
    assert "'d' could not be put back: out of edges" in caplog.text
    assert line.reads() == ["a", "b", "c"]


def test_a_refused_edit_is_not_noted_for_undoing(line):
    with pytest.raises(StopError), ge.transaction(line.graph):
        ge.reroute_ts(line.x, line.a)
        with pytest.raises(ge.CycleError):
            ge.reroute_ts(line.d, line.x)
        assert line.reads() == ["x", "b", "c"]
        raise StopError
    assert line.reads() == ["a", "b", "c"]


# -- edits as a whole ------------------------------------------------------------------


def test_intermediate_cycles_do_not_count(line):
    # c before b: each edit alone, applied first, would close a cycle.
    apply_edits(
        line.graph,
        [
            InputEdit(line.b.op, 0, line.c),
            InputEdit(line.c.op, 0, line.a),
            InputEdit(line.d.op, 0, line.b),
        ],
    )
    assert line.reads() == ["c", "a", "b"]
    ge.verify(line.graph)
    assert [float(v) for v in settings.evaluate(line.graph, [line.d])] == [-1.0]


# -- cost ------------------------------------------------------------------------------


def test_control_inputs_that_stay_are_not_taken_off(line, monkeypatch):
    # TensorFlow takes quadratic time to put many on again.
    def take_off(*_):
        raise AssertionError("control inputs were taken off")

    monkeypatch.setattr(tf.Operation, "_remove_all_control_inputs", take_off)
    ge.add_control_inputs(line.d.op, [line.a.op, line.i.op])
    assert settings.names(line.d.op.control_inputs) == ["x", "a", "i"]

    def search(*_):
        raise AssertionError("the order was searched")

    # Nor is the order searched for edges that lead up.
    monkeypatch.setattr("geutil.graph.adjacency._AffectedRegion.__init__", search)
    assert ge.reroute_ts(line.x, line.a) == 1
    ge.add_control_inputs(line.d.op, line.b.op)


# -- transactions ----------------------------------------------------------------------


def test_a_block_that_raises_is_undone(line):
    before = snapshot(line.graph)
    for error in (
        StopError,
        KeyboardInterrupt,
        SystemExit,
        GeneratorExit,
        BaseException,
    ):
        with pytest.raises(error), ge.transaction(line.graph):
            ge.reroute_ts(line.x, line.a)
            ge.swap_ts(line.b, line.c, can_modify=[line.d.op])
            ge.remove_control_inputs(line.d.op, line.x.op)
            ge.add_control_inputs(line.b.op, line.i.op)
            assert snapshot(line.graph) != before
            raise error
        assert snapshot(line.graph) == before, error
        assert not any(state_of(line.graph).journals.values())


@pytest.mark.parametrize("count", [2, 3, 20])
def test_control_inputs_come_back_in_their_order(count):
    with tf.Graph().as_default() as graph:
        x, y = tf.constant(1.0, name="x"), tf.constant(2.0, name="y")
        awaited = [tf.no_op(f"c{i}") for i in range(count)]
        with tf.control_dependencies(awaited[::-1]):
            z = tf.add(x, x, name="z")
    before = z.op.node_def, settings.names(z.op.control_inputs)
    with pytest.raises(StopError), ge.transaction(graph):
        ge.reroute_ts(y, x)
        ge.add_control_inputs(z.op, y.op)
        ge.remove_control_inputs(z.op, awaited[1])
        ge.reroute_ts(x, y)
        raise StopError
    after = z.op.node_def, settings.names(z.op.control_inputs)
    written = [list(node.input)[2:] for node, _ in (before, after)]
    assert written[1] == written[0] == [f"^c{i}" for i in reversed(range(count))]
    # TensorFlow itself returns many in the order of a hash set.
    assert count > 8 or after[1] == before[1]


def test_a_block_undoes_what_inner_ones_kept_and_they_only_their_part(line):
    before = snapshot(line.graph)
    with pytest.raises(StopError), ge.transaction(line.graph):
        # Open journals that are still empty are equal lists, but not the same list.
        with ge.transaction(line.graph), ge.transaction(line.graph):
            pass
        assert state_of(line.graph).order is None
        ge.reroute_ts(line.x, line.a)
        with pytest.raises(StopError), ge.transaction(line.graph):
            ge.reroute_ts(line.b, line.c)
            raise StopError
        assert line.reads() == ["x", "b", "c"]
        with ge.transaction(line.graph):
            ge.reroute_ts(line.b, line.c)
        assert line.reads() == ["x", "b", "b"]
        ge.remove_control_inputs(line.d.op, line.x.op)
        raise StopError
    assert snapshot(line.graph) == before
    assert not any(state_of(line.graph).journals.values())


def test_blocks_of_two_graphs_do_not_mix():
    first, second = Line(), Line()
    with pytest.raises(StopError), ge.transaction(first.graph):
        ge.reroute_ts(first.x, first.a)
        with ge.transaction(second.graph):
            ge.reroute_ts(second.x, second.a)
            ge.reroute_ts(first.b, first.c)
        raise StopError
    assert first.reads() == ["a", "b", "c"]
    assert second.reads() == ["x", "b", "c"]


def test_undo_after_the_graph_was_finalized(line):
    with pytest.raises(StopError), ge.transaction(line.graph):
        for t in (line.x, line.b, line.a, line.x):
            apply_edits(line.graph, [InputEdit(line.d.op, 0, t)])
        line.graph.finalize()
        # No edits need no editable graph.
        apply_edits(line.graph)
        raise StopError
    assert line.reads() == ["a", "b", "c"]
