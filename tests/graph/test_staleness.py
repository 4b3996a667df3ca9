"""Edits that TensorFlow would silently ignore."""

import gc
import itertools
import weakref

import pytest
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.framework import function

import geutil as ge
from tests import settings
from tests.graph.building import snapshot
from tests.processes import run_python

Session = tf.compat.v1.Session
LIVE = "a live Session has run this graph with op 'z' in it"
SPEC = tf.TensorSpec([], tf.float32)


class Net:
    """x = 1, y = 2, z reads x."""

    def __init__(self):
        with tf.Graph().as_default() as self.graph:
            self.x = tf.constant(1.0, name="x")
            self.y = tf.constant(2.0, name="y")
            self.z = tf.identity(self.x, name="z")

    def edit(self):
        return ge.reroute_ts(self.y, self.x)

    def fresh_result(self):
        with Session(graph=self.graph) as session:
            return float(session.run(self.z))


@pytest.fixture
def net():
    return Net()


def refused(net, message=LIVE):
    before = snapshot(net.graph)
    with pytest.raises(ge.StaleGraphError, match=message) as caught:
        net.edit()
    assert snapshot(net.graph) == before
    return str(caught.value)


# -- Sessions --------------------------------------------------------------------------


def test_an_edit_after_a_run_is_refused(net):
    with Session(graph=net.graph) as session:
        session.run(net.z)
        message = refused(net)
        assert session.run(net.z) == 1.0
    # What is wrong, and the two ways on.
    for words in (
        "would not see the edit",
        "the old result",
        "Close it and make a new tf.compat.v1.Session after the edit",
        "with geutil.allow_stale(graph):",
    ):
        assert words in message


def test_a_closed_session_does_not_hide_a_live_one(net):
    first, second = Session(graph=net.graph), Session(graph=net.graph)
    first.run(net.z)
    second.run(net.z)
    first.close()
    refused(net)
    second.close()
    assert net.edit() == 1


def test_geutil_keeps_no_session_and_no_graph_alive():
    net = Net()
    session = Session(graph=net.graph)
    session.run(net.z)
    refused(net)
    # One that was collected does not count.
    del session
    gc.collect()
    assert net.edit() == 1
    assert net.fresh_result() == 2.0
    session = Session(graph=net.graph)
    session.run(net.z)
    session.close()
    ends = weakref.ref(session), weakref.ref(net.graph)
    del session, net
    gc.collect()
    assert [end() for end in ends] == [None, None]


def test_each_session_counts_by_what_it_has_seen(net):
    early, later = Session(graph=net.graph), Session(graph=net.graph)
    early.run(net.z)
    with net.graph.as_default():
        late = tf.negative(net.x, name="late")
    later.run(net.z)
    only_late = {"can_modify": [late.op]}
    with pytest.raises(ge.StaleGraphError, match="with op 'late' in it"):
        ge.reroute_ts(net.y, net.x, **only_late)
    later.close()
    # The other one has not seen it, and sees the edit; the old ops are as they were.
    assert ge.reroute_ts(net.y, net.x, **only_late) == 1
    assert early.run([late, net.z]) == [-2.0, 1.0]
    with pytest.raises(ge.StaleGraphError, match="with op 'late' in it"):
        ge.reroute_ts(net.x, net.y, **only_late)
    # Nor does one of another graph count.
    other = Net()
    assert other.edit() == 1
    early.close()


def by_callable(session, net):
    call = session.make_callable(net.z)
    # TensorFlow takes the graph over here.
    with ge.allow_stale(net.graph):
        ge.reroute_ts(net.y, net.x, can_modify=[net.z.op])
        assert call() == 1.0
        ge.reroute_ts(net.x, net.y, can_modify=[net.z.op])


def by_options(session, net):
    options = config_pb2.CallableOptions(fetch=[net.z.name])
    call = session._make_callable_from_options(options)
    assert call() == [1.0]


def that_fails(session, net):
    with net.graph.as_default():
        missing = tf.compat.v1.placeholder(tf.float32, name="missing")
    with pytest.raises(tf.errors.InvalidArgumentError):
        session.run(missing)


RUNS = [
    lambda session, net: session.run(net.y),
    that_fails,
    lambda session, net: session.partial_run_setup([net.z], []),
    by_callable,
    by_options,
]


def test_what_counts_as_a_run():
    for run in RUNS:
        net = Net()
        with Session(graph=net.graph) as session:
            run(session, net)
            refused(net, "a live Session has run this graph")


def test_sessions_of_other_kinds_count(net):
    session = tf.compat.v1.InteractiveSession(graph=net.graph)
    try:
        net.z.eval()
        refused(net)
    finally:
        session.close()
    with net.graph.as_default(), tf.compat.v1.train.MonitoredSession() as session:
        assert session.run(net.z) == 1.0
        with pytest.raises(ge.FinalizedGraphError):
            net.edit()  # a MonitoredSession finalizes the graph


# -- allow_stale -----------------------------------------------------------------------


def test_allow_stale(net):
    with Session(graph=net.graph) as session:
        session.run(net.z)
        with pytest.raises(KeyError), ge.allow_stale(net.graph):
            raise KeyError
        with ge.allow_stale(tf.Graph()):
            refused(net)
        with ge.allow_stale(net.graph):
            with ge.allow_stale(net.graph):
                pass
            with pytest.raises(ge.CycleError):
                ge.add_control_inputs(net.x.op, net.z.op)
            assert net.edit() == 1
        assert session.run(net.z) == 1.0
        assert net.fresh_result() == 2.0
        with pytest.raises(ge.StaleGraphError):
            ge.reroute_ts(net.x, net.y)


def test_blocks_take_a_graph():
    wrongs = (None, "graph", 1, object())
    for make, wrong in itertools.product((ge.allow_stale, ge.transaction), wrongs):
        block = make(wrong)
        with pytest.raises(ge.ArgumentTypeError, match=r"expected a tf\.Graph"), block:
            pass


# -- finalized graphs ------------------------------------------------------------------


def test_a_finalized_graph_is_refused_even_with_allow_stale(net):
    net.graph.finalize()
    before = snapshot(net.graph)
    with ge.allow_stale(net.graph), pytest.raises(ge.FinalizedGraphError) as caught:
        net.edit()
    assert snapshot(net.graph) == before
    assert "is finalized" in str(caught.value)
    assert "geutil.copy(graph, tf.Graph())" in str(caught.value)
    copy = tf.Graph()
    ge.copy(net.graph, copy)
    x, y, z = (copy.get_tensor_by_name(f"{n}:0") for n in "xyz")
    assert ge.reroute_ts(y, x) == 1
    assert settings.evaluate(copy, [z]) == [2.0]


# -- functions -------------------------------------------------------------------------


def of_three(function):
    """Return what a Session computes of a function at 3."""
    with tf.Graph().as_default():
        result = function(tf.constant(3.0))
        with Session() as session:
            return float(session.run(result))


def edit_function(graph):
    result = graph.get_operation_by_name("result")
    return ge.reroute_ts(graph.inputs[0], result.inputs[0], can_modify=[result])


def test_a_tracing_func_graph_is_edited_and_the_function_sees_it():
    graphs = []

    @tf.function(autograph=False)
    def function(x):
        result = tf.identity(x * 2.0, name="result")
        graphs.append(result.graph)
        assert edit_function(result.graph) == 1
        return result

    concrete = function.get_concrete_function(SPEC)
    function.get_concrete_function(tf.TensorSpec([2], tf.float32))
    assert of_three(concrete) == 3.0
    graph, another = graphs
    assert another is not graph
    product = graph.get_operation_by_name("mul").outputs[0]
    with pytest.raises(ge.StaleGraphError):
        ge.reroute_ts(product, graph.inputs[0])
    with ge.allow_stale(graph):
        result = graph.get_operation_by_name("result")
        assert ge.reroute_ts(product, graph.inputs[0], can_modify=[result]) == 1
    # TensorFlow calls what it built.
    assert of_three(concrete) == 3.0


def test_bodies_of_functional_control_flow_are_built(control_flow_v2):
    bodies = {}

    def inside(name, value):
        bodies[name] = value.graph
        return tf.identity(value, name="result")

    with tf.Graph().as_default():
        x = tf.constant(1.0)
        tf.cond(x > 0.0, lambda: inside("then", x * 2.0), lambda: x)
        tf.while_loop(lambda v: v < 9.0, lambda v: [inside("body", v * 2.0)], [x])
    assert sorted(bodies) == ["body", "then"]
    for graph in bodies.values():
        result = graph.get_operation_by_name("result")
        with graph.as_default():
            other = tf.constant(1.0)
        with pytest.raises(ge.StaleGraphError, match="is built already"):
            ge.reroute_ts(other, result.inputs[0], can_modify=[result])


def test_a_body_is_edited_while_it_is_made(control_flow_v2):
    def body(v):
        result = tf.identity(v * 100.0, name="result")
        ge.reroute_ts(v + 1.0, result.op.inputs[0], can_modify=[result.op])
        return [result]

    with tf.Graph().as_default() as graph:
        result = tf.while_loop(lambda v: v < 3.5, body, [tf.constant(1.0)])[0]
    assert settings.evaluate(graph, [result]) == [4.0]


# -- functions of version 1 ------------------------------------------------------------


def doubled_in_version_1(inside):
    """A function of version 1 that doubles; `inside` gets its result in tracing."""

    @function.Defun(tf.float32, func_name="Double")
    def double(x):
        result = tf.identity(x * 2.0, name="result")
        inside(result)
        return result

    return double


def test_a_built_version_1_function_is_refused():
    graphs = []
    double = doubled_in_version_1(lambda result: graphs.append(result.graph))
    assert of_three(double) == 6.0
    (graph,) = graphs
    before = settings.edges(graph)
    with pytest.raises(ge.StaleGraphError, match=r"'Double' is built already.*Defun"):
        edit_function(graph)
    assert settings.edges(graph) == before
    with ge.allow_stale(graph):
        assert edit_function(graph) == 1
    # TensorFlow calls what it built.
    assert of_three(double) == 6.0
    # While it is traced, it sees edits.
    assert of_three(doubled_in_version_1(lambda y: edit_function(y.graph))) == 3.0


def test_bodies_of_version_1_datasets_are_built():
    graphs = []

    def body(x):
        result = tf.identity(x + 1, name="result")
        graphs.append(result.graph)
        return result

    with tf.Graph().as_default():
        numbers = tf.compat.v1.data.Dataset.range(3).map_with_legacy_function(body)
        tf.compat.v1.data.make_one_shot_iterator(numbers)
    for graph in graphs:
        with pytest.raises(ge.StaleGraphError, match="is built already"):
            edit_function(graph)


# -- older than geutil -----------------------------------------------------------------


START = """
import sys
import tensorflow as tf
with tf.Graph().as_default() as graph:
    x, y = tf.constant(1.0, name="x"), tf.constant(2.0, name="y")
    z = tf.identity(x, name="z")
def attempt(new, old, op):
    try:
        print(ge.reroute_ts(new, old, can_modify=[op]))
    except ge.StaleGraphError as error:
        print("live" if "live Session" in str(error) else "built")
"""
OLDER = (
    START
    + """
class MySession(tf.compat.v1.Session):
    pass
session, closed = MySession(graph=graph), tf.compat.v1.Session(graph=graph)
session.run(z)
closed.run(z)
closed.close()
@tf.function(autograph=False)
def function(x):
    return tf.identity(x * 2.0, name="result")
concrete = function.get_concrete_function(tf.TensorSpec([], tf.float32))
from tensorflow.python.framework import function as version_1
@version_1.Defun(tf.float32)
def defun(x):
    global body
    body = tf.identity(x * 2.0, name="result").graph
with tf.Graph().as_default():
    defun(tf.constant(1.0))
assert not any(name.startswith("geutil") for name in sys.modules)

import geutil as ge
attempt(y, x, z.op)
with graph.as_default():
    late = tf.negative(x, name="late")
attempt(y, x, late.op)
session.close()
attempt(y, x, z.op)
result = concrete.graph.get_operation_by_name("result")
attempt(concrete.graph.inputs[0], result.inputs[0], result)
result = body.get_operation_by_name("result")
attempt(body.inputs[0], result.inputs[0], result)
"""
)
# The server of processes has imported TensorFlow, which is hidden at first.
BETWEEN = f"""
import sys
names = [n for n in sys.modules if n.partition(".")[0] == "tensorflow"]
hidden = {{name: sys.modules.pop(name) for name in names}}
import geutil as ge
assert not any(name.startswith("tensorflow") for name in sys.modules)
sys.modules |= hidden
{START}
session = tf.compat.v1.Session(graph=graph)
session.run(z)
attempt(y, x, z.op)
session.close()
attempt(y, x, z.op)
newer = tf.compat.v1.Session(graph=graph)
print(newer.run(z))
attempt(x, y, z.op)
"""


@pytest.mark.parametrize(
    ("code", "told"),
    [(OLDER, "live 1 1 built built"), (BETWEEN, "live 1 2.0 live")],
    ids=["older than geutil", "between its import and its first use"],
)
def test_what_was_made_before_geutil_was_used_is_known(code, told):
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr.decode()
    assert result.stdout.decode().split() == told.split()


# -- how it is noticed -----------------------------------------------------------------


def test_edits_do_not_scan_the_heap(net, monkeypatch):
    def scan(*args):
        raise AssertionError("an edit scans the heap")

    monkeypatch.setattr(gc, "get_objects", scan)
    monkeypatch.setattr(gc, "get_referrers", scan)
    with Session(graph=net.graph) as session:
        session.run(net.z)
        refused(net)
    assert net.edit() == 1
    double = tf.function(lambda x: tf.identity(x * 2.0, name="result"))
    graph = double.get_concrete_function(SPEC).graph
    with pytest.raises(ge.StaleGraphError):
        edit_function(graph)


def test_watch_wraps_once():
    code = """
import sys
from tensorflow.python.client.session import BaseSession
found = [BaseSession._extend_graph]
for _ in range(2):
    import geutil
    geutil.reroute_ts
    found.append(BaseSession._extend_graph)
    for name in [n for n in sys.modules if n.partition(".")[0] == "geutil"]:
        del sys.modules[name]
assert found[0] is not found[1]
assert found[1] is found[2]
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr.decode()
