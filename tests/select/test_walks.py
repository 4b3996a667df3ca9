import contextlib
import io

import networkx as nx
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import geutil as ge
from tests.processes import run_python
from tests.random_graphs import drawn_graphs
from tests.select.samples import diamond, looking, many_readers, other_graph
from tests.settings import NAMES, Setting, names
from tests.thorough import length

forward, backward = ge.get_forward_walk_ops, ge.get_backward_walk_ops
intersection, union = ge.get_walks_intersection_ops, ge.get_walks_union_ops


def controls(g):
    return ge.ControlOutputs(g.graph)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        # Seeds.
        (lambda g: forward(g.x.op), "x a b c d"),
        (lambda g: forward([g.x.op]), "x a b c d"),
        (lambda g: forward((g.x.op, g.x.op)), "x a b c d"),
        (lambda g: forward(g.x), "a b c d"),
        (lambda g: forward([g.x]), "a b c d"),
        (lambda g: forward([g.a, g.b]), "c d"),
        (lambda g: forward([g.c, g.x]), "d a b c"),
        (lambda g: forward([g.b.op, g.a.op]), "b a c d"),
        (lambda g: forward([g.c.op, g.x.op]), "c x d a b"),
        (lambda g: forward(op for op in [g.c.op]), "c d"),
        (lambda g: forward(ge.sgv(g.c.op).inputs), "c d"),
        (lambda g: forward(g.d), ""),
        (lambda g: forward([]), ""),
        (lambda g: forward(()), ""),
        # inclusive
        (lambda g: forward(g.x.op, inclusive=False), "a b c d"),
        (lambda g: forward(g.x, inclusive=False), "c d"),
        (lambda g: forward(g.x.op, False), "a b c d"),
        (lambda g: forward([g.a.op, g.c.op], inclusive=False), "d"),
        (lambda g: forward(g.d.op, inclusive=False), ""),
        (lambda g: forward([], inclusive=False), ""),
        # within_ops
        (lambda g: forward(g.x.op, within_ops=[g.x.op, g.a.op, g.c.op]), "x a c"),
        (lambda g: forward(g.x.op, within_ops=g.x.op), "x"),
        (lambda g: forward(g.x.op, within_ops=[g.x.op, g.c.op]), "x"),
        (lambda g: forward(g.x.op, within_ops=[g.a.op, g.c.op]), ""),
        (lambda g: forward(g.x, within_ops=[g.a.op, g.c.op]), "a c"),
        (lambda g: forward(g.x.op, within_ops=[]), ""),
        (lambda g: forward(g.x.op, within_ops=()), ""),
        (lambda g: forward(g.x, within_ops=[]), ""),
        (lambda g: forward(g.x.op, within_ops=None), "x a b c d"),
        # within_ops_fn
        (lambda g: forward(g.x.op, within_ops_fn=ge.op_type("Neg")), "x a"),
        (lambda g: forward(g.x.op, within_ops_fn=lambda op: op.name != "c"), "x a b"),
        (
            lambda g: forward(
                g.x.op,
                within_ops=[g.x.op, g.a.op, g.c.op],
                within_ops_fn=lambda op: op.name != "c",
            ),
            "x a",
        ),
        # stop_at_ts
        (lambda g: forward(g.x.op, stop_at_ts=[g.c]), "x a b c"),
        (lambda g: forward(g.x.op, stop_at_ts=g.c), "x a b c"),
        (lambda g: forward(g.x.op, stop_at_ts=[g.a]), "x a b c d"),
        (lambda g: forward(g.x.op, stop_at_ts=(g.a, g.b)), "x a b"),
        (lambda g: forward(g.x.op, stop_at_ts=[g.x]), "x"),
        (lambda g: forward(g.x.op, stop_at_ts=g.graph), "x"),
        (lambda g: forward(g.x.op, stop_at_ts=[]), "x a b c d"),
        # Control edges.
        (lambda g: forward(g.x.op, control_outputs=controls(g)), "x a b c w d"),
        (lambda g: forward(g.w.op, control_outputs=controls(g)), "w"),
        (
            lambda g: forward(g.a.op, control_outputs=controls(g), stop_at_ts=[g.a]),
            "a w",
        ),
        (
            lambda g: forward(
                g.a.op, control_outputs=controls(g), within_ops=[g.a.op, g.w.op]
            ),
            "a w",
        ),
        (
            lambda g: forward(
                g.a.op,
                control_outputs=controls(g),
                within_ops_fn=lambda op: op.name != "w",
            ),
            "a c d",
        ),
    ],
)
def test_forward_walk(setting, call, expected):
    def body():
        g = diamond()
        with looking():
            assert names(call(g)) == expected.split()

    setting.run(body)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda g: backward(g.d.op), "d c a b x"),
        (lambda g: backward([g.d.op, g.d.op]), "d c a b x"),
        (lambda g: backward(g.d), "d c a b x"),
        (lambda g: backward([g.d, g.d]), "d c a b x"),
        (lambda g: backward([g.b, g.a]), "b a x"),
        (lambda g: backward(ge.sgv(g.c.op).inputs), "a b x"),
        (lambda g: backward(t for t in [g.b]), "b x"),
        (lambda g: backward([]), ""),
        (lambda g: backward(()), ""),
        (lambda g: backward(g.x), "x"),
        (lambda g: backward(g.d.op, inclusive=False), "c a b x"),
        (lambda g: backward(g.d, inclusive=False), "c a b x"),
        (lambda g: backward([g.d.op, g.a.op], inclusive=False), "c x b"),
        (lambda g: backward([], inclusive=False), ""),
        (lambda g: backward(g.d.op, within_ops=[g.d.op, g.c.op, g.x.op]), "d c"),
        (lambda g: backward(g.d.op, within_ops=[g.c.op, g.x.op]), ""),
        (lambda g: backward(g.d.op, within_ops=[]), ""),
        (lambda g: backward(g.d, within_ops=[]), ""),
        (lambda g: backward(g.d.op, within_ops=g.d.op), "d"),
        (
            lambda g: backward(g.d.op, within_ops_fn=lambda op: op.name != "a"),
            "d c b x",
        ),
        (lambda g: backward(g.d.op, within_ops_fn=lambda op: False), "d"),
        (lambda g: backward(g.d.op, stop_at_ts=[g.a]), "d c b x"),
        (lambda g: backward(g.d.op, stop_at_ts=g.c), "d"),
        (lambda g: backward(g.d.op, stop_at_ts=[g.a, g.b]), "d c"),
        (lambda g: backward(g.d.op, stop_at_ts=g.graph), "d"),
        (lambda g: backward(g.w.op), "w"),
        (lambda g: backward(g.w.op, control_inputs=True), "w a x"),
        (lambda g: backward(g.w, control_inputs=True), "w a x"),
        (lambda g: backward(g.w.op, control_inputs=True, inclusive=False), "a x"),
        (lambda g: backward(g.w.op, control_inputs=True, stop_at_ts=[g.x]), "w a"),
        (
            lambda g: backward(g.w.op, control_inputs=True, within_ops=[g.w.op]),
            "w",
        ),
        (
            lambda g: backward(
                g.w.op, control_inputs=True, within_ops_fn=lambda op: op.name != "a"
            ),
            "w",
        ),
    ],
)
def test_backward_walk(setting, call, expected):
    def body():
        g = diamond()
        with looking():
            assert names(call(g)) == expected.split()

    setting.run(body)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda g: intersection(g.a.op, g.d.op), "a c d"),
        (lambda g: intersection(g.x.op, g.c.op), "x a b c"),
        (lambda g: intersection(g.x, g.c), "a b c"),
        (lambda g: intersection(g.a.op, g.b.op), ""),
        (lambda g: intersection(g.a.op, g.d.op, forward_inclusive=False), "c d"),
        (lambda g: intersection(g.a.op, g.d.op, backward_inclusive=False), "a c"),
        (lambda g: intersection(g.a.op, g.d.op, False, False), "c"),
        (lambda g: intersection([], g.d.op), ""),
        (lambda g: intersection(g.x.op, []), ""),
        (
            lambda g: intersection(
                g.x.op, g.d.op, within_ops=[g.x.op, g.a.op, g.c.op, g.d.op]
            ),
            "x a c d",
        ),
        (lambda g: intersection(g.x.op, g.d.op, within_ops=[]), ""),
        (
            lambda g: intersection(
                g.x.op, g.d.op, within_ops_fn=lambda op: op.name != "b"
            ),
            "x a c d",
        ),
        (lambda g: intersection(g.x.op, g.w.op), ""),
        (lambda g: intersection(g.x.op, g.w.op, control_inputs=True), "x a"),
        (lambda g: intersection(g.x.op, g.w.op, control_outputs=controls(g)), "w"),
        (lambda g: intersection(g.x.op, g.w.op, control_ios=controls(g)), "x a w"),
        (lambda g: union(g.c.op, g.c.op), "c d a b x"),
        (lambda g: union(g.c, g.c), "d c a b x"),
        (lambda g: union(g.c.op, g.c.op, forward_inclusive=False), "d c a b x"),
        (lambda g: union(g.c.op, g.c.op, False, False), "d a b x"),
        (lambda g: union([], g.a.op), "a x"),
        (lambda g: union(g.c.op, []), "c d"),
        (lambda g: union([], []), ""),
        (lambda g: union(g.c.op, g.c.op, within_ops=[g.c.op, g.a.op]), "c a"),
        (lambda g: union(g.c.op, g.c.op, within_ops=[]), ""),
        (
            lambda g: union(g.c.op, g.c.op, within_ops_fn=lambda op: op.name != "a"),
            "c d b x",
        ),
        (lambda g: union(g.d.op, g.w.op), "d w"),
        (lambda g: union(g.d.op, g.w.op, control_inputs=True), "d w a x"),
        (
            lambda g: union(g.a.op, g.d.op, control_outputs=controls(g)),
            "a c w d b x",
        ),
        (lambda g: union(g.d.op, g.w.op, control_ios=controls(g)), "d w a x"),
    ],
)
def test_two_walks(setting, call, expected):
    def body():
        g = diamond()
        with looking():
            assert names(call(g)) == expected.split()

    setting.run(body)


def test_the_predicate_is_not_asked_about_seeds_nor_about_ops_not_within(setting):
    def body():
        g = diamond()
        asked = []

        def remember(op):
            asked.append(op.name)
            return True

        forward(g.x.op, within_ops=[g.x.op, g.a.op], within_ops_fn=remember)
        assert asked == ["a"]

    setting.run(body)


def test_consumers_come_in_graph_order(setting):
    def body():
        source, readers = many_readers(30)
        expected = [t.op.name for t in readers]
        with looking():
            assert names(forward(source)) == expected
            assert names(forward(source.op)) == ["source", *expected]
            assert names(forward(source.op, inclusive=False)) == expected

    setting.run(body)


_PRINT_ORDERS = """
import tensorflow as tf
import geutil as ge

with tf.Graph().as_default() as graph:
    source = tf.constant(1.0, name="source")
    readers = [tf.negative(source, name=f"reader{i}") for i in range(40)]
    with tf.control_dependencies([source]):
        waiting = [tf.constant(1.0, name=f"waits{i}") for i in range(40)]
    total = tf.add_n(readers, name="total")
    with tf.control_dependencies(waiting):
        last = tf.constant(1.0, name="last")
    controls = ge.ControlOutputs(graph)
    view = ge.sgv(source.op)
    for ops in (
        ge.get_forward_walk_ops(source, control_outputs=controls),
        ge.get_forward_walk_ops(source.op, control_outputs=controls),
        ge.get_backward_walk_ops(total.op),
        ge.get_walks_union_ops(source, total),
        ge.get_ops_ios(source.op, control_ios=controls),
        ge.get_consuming_ops(source),
        controls.get(source.op),
        view.consumers(),
        ge.get_backward_walk_ops(last.op, control_inputs=True),
        ge.get_ops_ios(last.op, control_inputs=True),
    ):
        print(" ".join(op.name for op in ops))
"""


def test_order_is_the_same_in_every_process():
    # The hash of a string and the place of an object differ between processes.
    code = f"{_PRINT_ORDERS}\nprint(hash('reader0'))"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    first, here = printed.getvalue().strip().rsplit("\n", 1)
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr.decode()
    second, there = done.stdout.decode().strip().rsplit("\n", 1)
    assert here != there
    readers = [f"reader{i}" for i in range(40)]
    waiting = [f"waits{i}" for i in range(40)]
    assert [line.split() for line in first.splitlines()] == [
        [*readers, "total"],
        ["source", *readers, *waiting, "total", "last"],
        ["total", *readers, "source"],
        [*readers, "total", "source"],
        [*readers, *waiting],
        readers,
        waiting,
        readers,
        ["last", *waiting, "source"],
        waiting,
    ]
    assert second == first


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(drawn=drawn_graphs(), data=st.data())
def test_walks_agree_with_networkx(name, drawn, data):
    ids = st.lists(st.integers(0, len(drawn.inputs) - 1), min_size=1, max_size=3)
    start, end = data.draw(ids), data.draw(ids)
    plain, all_edges = drawn.networkx(), drawn.networkx(controls=True)

    def after(graph, seeds):
        seeds = {f"op{i}" for i in seeds}
        return seeds.union(*(nx.descendants(graph, s) for s in seeds))

    def before(graph, seeds):
        return after(graph.reverse(), seeds)

    def found(ops):
        listed = names(ops)
        assert len(set(listed)) == len(listed)
        return set(listed)

    def body():
        tensors = drawn.build()
        graph = tensors[0].graph
        cios = ge.ControlOutputs(graph)
        first = [tensors[i].op for i in start]
        last = [tensors[i].op for i in end]
        with looking():
            assert found(forward(first)) == after(plain, start)
            assert found(backward(last)) == before(plain, end)
            assert found(forward(first, control_outputs=cios)) == after(
                all_edges, start
            )
            assert found(backward(last, control_inputs=True)) == before(all_edges, end)
            for edges, arguments in ((plain, {}), (all_edges, {"control_ios": cios})):
                ahead, behind = after(edges, start), before(edges, end)
                assert found(intersection(first, last, **arguments)) == ahead & behind
                assert found(union(first, last, **arguments)) == ahead | behind

    Setting(name).run(body)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(drawn=drawn_graphs(), data=st.data())
def test_restricted_walks_agree_with_networkx(drawn, data):
    count = len(drawn.inputs)
    seed = data.draw(st.integers(0, count - 1))
    within = data.draw(st.sets(st.integers(0, count - 1)))
    stops = data.draw(st.sets(st.integers(0, count - 1)))
    # An edge leaves the tensor of its producer: stopping there takes the edge off.
    edges = drawn.networkx().subgraph([f"op{i}" for i in within]).copy()
    edges.remove_edges_from([(f"op{i}", f"op{j}") for i in stops for j in range(count)])
    name = f"op{seed}"
    start = {name} & set(edges)
    expected_after = start | set().union(*(nx.descendants(edges, s) for s in start))
    expected_before = start | set().union(*(nx.ancestors(edges, s) for s in start))
    with tf.Graph().as_default():
        tensors = drawn.build()
        limits = {
            "within_ops": [tensors[i].op for i in within],
            "stop_at_ts": [tensors[i] for i in stops],
        }
        assert set(names(forward(tensors[seed].op, **limits))) == expected_after
        assert set(names(backward(tensors[seed].op, **limits))) == expected_before


@settings(max_examples=40, deadline=None, derandomize=True)
@given(drawn=drawn_graphs(), data=st.data())
def test_walks_are_breadth_first(drawn, data):
    seed = data.draw(st.integers(0, len(drawn.inputs) - 1))
    edges = drawn.networkx()
    with tf.Graph().as_default():
        op = drawn.build()[seed].op
        for walk, graph in ((forward, edges), (backward, edges.reverse())):
            distance = nx.single_source_shortest_path_length(graph, op.name)
            distances = [distance[name] for name in names(walk(op))]
            assert distances == sorted(distances)


def test_a_very_long_chain_needs_no_recursion():
    count = length(100_000)
    graph_def = tf.compat.v1.GraphDef()
    first = graph_def.node.add(name="n0", op="Placeholder")
    first.attr["dtype"].type = tf.float32.as_datatype_enum
    for i in range(1, count):
        node = graph_def.node.add(name=f"n{i}", op="Neg", input=[f"n{i - 1}"])
        node.attr["T"].type = tf.float32.as_datatype_enum
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(graph_def, name="")
        ops = graph.get_operations()
        assert len(ops) == count
        assert forward(ops[0]) == ops
        assert backward(ops[-1]) == ops[::-1]
        assert intersection(ops[1], ops[-2]) == ops[1:-1]
        assert set(union(ops[count // 2], ops[count // 2])) == set(ops)
        assert ge.get_within_boundary_ops(ops, ops[count // 2]) == ops
        view = ge.sgv(ops[1:])
        assert names(view.inputs) == ["n0:0"]
        assert names(view.outputs) == [f"n{count - 1}:0"]
        assert view.remove_unused_ops().ops == ops[1:]


@pytest.mark.parametrize("walk", [forward, backward])
@pytest.mark.parametrize(
    ("arguments", "error", "builtin", "words"),
    [
        (lambda g, o: ["x"], ge.ArgumentTypeError, TypeError, ["str"]),
        (lambda g, o: ["x", 1], ge.ArgumentTypeError, TypeError, ["str"]),
        (lambda g, o: [g.graph], ge.ArgumentTypeError, TypeError, ["get_operations"]),
        (lambda g, o: [[g.a, g.b.op]], ge.ArgumentTypeError, TypeError, ["Operation"]),
        (lambda g, o: [[g.a.op, g.b]], ge.ArgumentTypeError, TypeError, ["Tensor"]),
        (lambda g, o: [g.a.op, True, g.graph], ge.ArgumentTypeError, TypeError, []),
        (lambda g, o: [g.a.op, True, [g.a]], ge.ArgumentTypeError, TypeError, []),
        (
            lambda g, o: [g.a.op, True, None, None, [g.a.op]],
            ge.ArgumentTypeError,
            TypeError,
            ["tf.Tensor"],
        ),
        (
            lambda g, o: [[g.a.op, o.b.op]],
            ge.SelectionError,
            ValueError,
            ["'a'", "'b'", "different graphs"],
        ),
        (
            lambda g, o: [[g.a, o.b]],
            ge.SelectionError,
            ValueError,
            ["'a:0'", "'b:0'", "different graphs"],
        ),
    ],
)
def test_refusals(setting, walk, arguments, error, builtin, words):
    other = other_graph()

    def body():
        g = diamond()
        with looking(), pytest.raises(error) as caught:
            walk(*arguments(g, other))
        assert isinstance(caught.value, ge.GeutilError)
        assert isinstance(caught.value, builtin)
        for word in words:
            assert word in str(caught.value)

    setting.run(body)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda g: forward(g.x.op, control_outputs=True), ge.ArgumentTypeError),
        (lambda g: forward(g.x.op, control_outputs=g.graph), ge.ArgumentTypeError),
        (
            lambda g: intersection(g.x.op, g.d.op, control_ios=True),
            ge.ArgumentTypeError,
        ),
        (
            lambda g: intersection(
                g.x.op, g.d.op, control_outputs=controls(g), control_ios=controls(g)
            ),
            ge.SelectionError,
        ),
        (
            lambda g: union(
                g.x.op, g.d.op, control_outputs=controls(g), control_ios=controls(g)
            ),
            ge.SelectionError,
        ),
        (lambda g: union(g.x.op, g.d.op, control_outputs=1), ge.ArgumentTypeError),
    ],
)
def test_refuses_wrong_control_arguments(setting, call, error):
    def body():
        g = diamond()
        with looking(), pytest.raises(error, match="control_"):
            call(g)

    setting.run(body)
