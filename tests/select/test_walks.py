import contextlib
import io

import networkx as nx
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import geutil as ge
from tests.graph.building import chain
from tests.processes import run_python
from tests.random_graphs import drawn_graphs
from tests.select import tables
from tests.select.samples import diamond, looking, other_graph
from tests.settings import NAMES, Setting, in_each_setting, names
from tests.thorough import examples, length

forward, backward = ge.get_forward_walk_ops, ge.get_backward_walk_ops
intersection, union = ge.get_walks_intersection_ops, ge.get_walks_union_ops
WALKS = {
    "forward": forward,
    "backward": backward,
    "intersection": intersection,
    "union": union,
}
FOUND = """
# Seeds.
forward(x.op) => x a b c d
forward([x.op]) => x a b c d
forward(x) => a b c d
forward([a, b]) => c d
forward([b.op, a.op]) => b a c d
forward((op for op in [c.op])) => c d
forward(ge.sgv(c.op).inputs) => c d
forward(d) =>
forward([]) =>
# inclusive
forward(x.op, inclusive=False) => a b c d
forward(x, inclusive=False) => c d
forward([a.op, c.op], inclusive=False) => d
forward(d.op, inclusive=False) =>
# within_ops
forward(x.op, within_ops=[x.op, a.op, c.op]) => x a c
forward(x.op, within_ops=x.op) => x
forward(x, within_ops=[a.op, c.op]) => a c
forward(x.op, within_ops=[]) =>
# within_ops_fn
forward(x.op, within_ops_fn=ge.op_type('Neg')) => x a
forward(x.op, within_ops_fn=lambda op: op.name != 'c') => x a b
forward(x.op, within_ops=[x.op, a.op, c.op],
    within_ops_fn=lambda op: op.name != 'c') => x a
# stop_at_ts
forward(x.op, stop_at_ts=c) => x a b c
forward(x.op, stop_at_ts=(a, b)) => x a b
forward(x.op, stop_at_ts=graph) => x
# Control edges.
forward(x.op, control_outputs=controls) => x a b c w d
forward(a.op, control_outputs=controls, stop_at_ts=[a]) => a w
forward(a.op, control_outputs=controls, within_ops=[a.op, w.op]) => a w
forward(a.op, control_outputs=controls, within_ops_fn=lambda op: op.name != 'w')
    => a c d
backward(d.op) => d c a b x
backward(d) => d c a b x
backward([b, a]) => b a x
backward(ge.sgv(c.op).inputs) => a b x
backward((t for t in [b])) => b x
backward([]) =>
backward(d.op, inclusive=False) => c a b x
backward([d.op, a.op], inclusive=False) => c x b
backward(d.op, within_ops=[d.op, c.op, x.op]) => d c
backward(d.op, within_ops=d.op) => d
backward(d.op, within_ops_fn=lambda op: op.name != 'a') => d c b x
backward(d.op, within_ops_fn=lambda op: False) => d
backward(d.op, stop_at_ts=c) => d
backward(d.op, stop_at_ts=graph) => d
backward(w.op, control_inputs=True) => w a x
backward(w, control_inputs=True) => w a x
backward(w.op, control_inputs=True, inclusive=False) => a x
backward(w.op, control_inputs=True, stop_at_ts=[x]) => w a
backward(w.op, control_inputs=True, within_ops=[w.op]) => w
backward(w.op, control_inputs=True, within_ops_fn=lambda op: op.name != 'a') => w
intersection(x.op, c.op) => x a b c
intersection(x, c) => a b c
intersection(a.op, d.op, forward_inclusive=False) => c d
intersection(a.op, d.op, backward_inclusive=False) => a c
intersection(a.op, d.op, False, False) => c
intersection(x.op, []) =>
intersection(x.op, d.op, within_ops=[x.op, a.op, c.op, d.op]) => x a c d
intersection(x.op, d.op, within_ops_fn=lambda op: op.name != 'b') => x a c d
intersection(x.op, w.op) =>
intersection(x.op, w.op, control_inputs=True) => x a
intersection(x.op, w.op, control_outputs=controls) => w
intersection(x.op, w.op, control_ios=controls) => x a w
union(c.op, c.op) => c d a b x
union(c, c) => d c a b x
union(c.op, c.op, False, False) => d a b x
union([], a.op) => a x
union(c.op, []) => c d
union(c.op, c.op, within_ops=[c.op, a.op]) => c a
union(c.op, c.op, within_ops_fn=lambda op: op.name != 'a') => c d b x
union(d.op, w.op, control_inputs=True) => d w a x
union(a.op, d.op, control_outputs=controls) => a c w d b x
union(d.op, w.op, control_ios=controls) => d w a x
"""


@in_each_setting
def test_walks():
    g = diamond()
    tables.check_found(FOUND, g, **WALKS)
    # The predicate is not asked about seeds, nor about ops that are not within.
    asked = []
    ask = lambda op: not asked.append(op.name)  # noqa: E731
    forward(g.x.op, within_ops=[g.x.op, g.a.op], within_ops_fn=ask)
    assert asked == ["a"]
    # Of two readers the older one comes first, even if it reads it last.
    first = tf.exp(g.x, name="first")
    tf.sin(g.w, name="second")
    ge.reroute_ts(g.w, g.x, can_modify=[first.op])
    assert names(forward(g.w.op)) == ["w", "first", "second"]


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
@examples(40, derandomize=True)
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

    def is_breadth_first(ops, edges):
        distance = nx.single_source_shortest_path_length(edges, ops[0].name)
        distances = [distance[name] for name in names(ops)]
        return distances == sorted(distances)

    def body():
        tensors = drawn.build()
        graph = tensors[0].graph
        cios = ge.ControlOutputs(graph)
        first = [tensors[i].op for i in start]
        last = [tensors[i].op for i in end]
        with looking():
            assert found(forward(first)) == after(plain, start)
            assert found(backward(last)) == before(plain, end)
            assert is_breadth_first(forward(first[0]), plain)
            assert is_breadth_first(backward(last[0]), plain.reverse())
            assert found(forward(first, control_outputs=cios)) == after(
                all_edges, start
            )
            assert found(backward(last, control_inputs=True)) == before(all_edges, end)
            for edges, arguments in ((plain, {}), (all_edges, {"control_ios": cios})):
                ahead, behind = after(edges, start), before(edges, end)
                assert found(intersection(first, last, **arguments)) == ahead & behind
                assert found(union(first, last, **arguments)) == ahead | behind

    Setting(name).run(body)


@examples(40, derandomize=True)
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


def test_a_very_long_chain_needs_no_recursion():
    count = length(100_000)
    ops = chain(count).get_operations()
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


REFUSED = """
walk('x') => ArgumentTypeError: str
walk('x', 1) => ArgumentTypeError: str
walk(graph) => ArgumentTypeError: get_operations
walk([a, b.op]) => ArgumentTypeError: Operation
walk([a.op, b]) => ArgumentTypeError: Tensor
walk(a.op, True, graph) => ArgumentTypeError:
walk(a.op, True, [a]) => ArgumentTypeError:
walk(a.op, True, None, None, [a.op]) => ArgumentTypeError: tf.Tensor
walk([a.op, other.b.op]) => SelectionError: 'a'; 'b'; different graphs
walk([a, other.b]) => SelectionError: 'a:0'; 'b:0'; different graphs
"""
REFUSED_CONTROLS = """
forward(x.op, control_outputs=True) => ArgumentTypeError: control_
forward(x.op, control_outputs=graph) => ArgumentTypeError: control_
intersection(x.op, d.op, control_ios=True) => ArgumentTypeError: control_
intersection(x.op, d.op, control_outputs=controls, control_ios=controls)
    => SelectionError: control_
union(x.op, d.op, control_outputs=controls, control_ios=controls)
    => SelectionError: control_
union(x.op, d.op, control_outputs=1) => ArgumentTypeError: control_
"""


@in_each_setting
def test_refusals():
    other = other_graph()
    g = diamond()
    for walk in (forward, backward):
        tables.check_refusals(REFUSED, g, walk=walk, other=other)
    tables.check_refusals(REFUSED_CONTROLS, g, **WALKS)
