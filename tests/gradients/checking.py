"""What must hold of every graph with recomputation, and how to run one."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import networkx as nx
import numpy as np
import tensorflow as tf

import geutil as ge
from geutil import memory
from geutil.gradients import Report, construction, gradients
from geutil.gradients.tape import TapeEngine
from geutil.graph.runtime import is_determinism_enabled
from tests.processes import forked

SCOPE = "recomputed/"
EAGER_SUMS = TapeEngine(min_aggregate_count=2, min_aggregate_bytes=0)
TAPES = "tape", EAGER_SUMS
_HELPERS = ("NoOp", "PlaceholderWithDefault")


def deep(x: tf.Tensor) -> tf.Tensor:
    """Return what is worth recomputing, and has to be for a gradient."""
    return tf.sin(tf.exp(tf.sin(x)))


def flat(gradients: Iterable[Any]) -> list[tf.Tensor]:
    """Return the tensors of gradients, the three of `tf.IndexedSlices` apart."""
    tensors: list[tf.Tensor] = []
    for gradient in gradients:
        if isinstance(gradient, tf.IndexedSlices):
            tensors += [gradient.values, gradient.indices]
            if gradient.dense_shape is not None:
                tensors.append(gradient.dense_shape)
        elif gradient is not None:
            tensors.append(gradient)
    return tensors


def forms(gradients: Iterable[Any]) -> list[str]:
    """Return what each gradient is: a tensor, slices or None."""
    return [
        {tf.IndexedSlices: "slices", type(None): "none"}.get(type(g), "tensor")
        for g in gradients
    ]


def run(
    graph: tf.Graph,
    fetches: Any,
    feed: dict[Any, Any] | None = None,
    *,
    optimize: bool = False,
    options: Any = None,
    metadata: Any = None,
) -> Any:
    """Return the values of fetches of a `tf.Graph`, its variables initialized.

    Without optimization two graphs run the same kernels, so values can be compared bit
    for bit.
    """
    config = tf.compat.v1.ConfigProto(
        inter_op_parallelism_threads=1, intra_op_parallelism_threads=1
    )
    if not optimize:
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        config.graph_options.optimizer_options.opt_level = -1
    with graph.as_default():
        initial = [v.initializer for v in tf.compat.v1.global_variables()]
        with tf.compat.v1.Session(graph=graph, config=config) as session:
            session.run(initial)
            return session.run(fetches, feed, options=options, run_metadata=metadata)


def trace_network(
    net: Callable[..., tf.Tensor],
    how: Callable[[tf.Tensor, list[Any]], Any],
    shape: Sequence[int],
    device: str | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Return what `how` makes of a network's loss and variables, and its function.

    Args:
        net: a Keras layer or model.
        how: returns the gradients that the function yields, or anything else.
        shape: of the batch.
        device: of the whole step.
        options: of `tf.function`.
    """
    made = []

    @tf.function(autograph=False, **options)
    def train(x: tf.Tensor) -> Any:
        with tf.device(device):
            outputs = tf.cast(net(x, training=True), tf.float32)
            loss = tf.reduce_mean(tf.square(outputs))
            made.append(how(loss, [v.value for v in net.trainable_variables]))
        return made[-1] if isinstance(made[-1], list) else loss

    function = train.get_concrete_function(tf.TensorSpec(shape))
    return made[-1], function


def measured_peak(function: Any, x: Any, steps: int = 1, **options: Any) -> int:
    """Return the peak of a function in a process of its own."""
    with forked():
        return memory.measure(function, [x], steps=steps, **options).peak


def add_in_order(graph: tf.Graph) -> None:
    """Let each sum of a graph that was not run yet begin with its first input.

    `AddN` begins with the first input that nothing else holds any more: which one that
    is can depend on what has run by chance (see
    `geutil.gradients.construction`), and then plain gradients do
    not repeat their own bits. What `Snapshot` yields nothing else holds.
    """
    for op in graph.get_operations():
        if op.type == "AddN" and len(op.inputs) > 2:
            with graph.as_default(), tf.control_dependencies(None):
                op._update_input(0, tf.raw_ops.Snapshot(input=op.inputs[0]))


def assert_same(actual: Sequence[Any], expected: Sequence[Any]) -> None:
    """Check that values are the same bit for bit."""
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def assert_as_near(actual: Sequence[Any], expected: Sequence[Any]) -> None:
    """Check what is promised: the same bits under determinism, otherwise 1e-6.

    Grappler adds in the order of names, so does `geutil.gradients`; without Grappler,
    as in `run`, TensorFlow's order is another one.
    """
    compare = assert_same if is_determinism_enabled() else assert_close
    compare(actual, expected)


def assert_close(
    actual: Sequence[Any],
    expected: Sequence[Any],
    summands: float = 0.0,
    tolerance: float = 1e-6,
) -> None:
    """Check that values agree to 1e-6 of the largest of each.

    Args:
        actual: the values.
        expected: what they should be.
        summands: how large the numbers are that some of them are sums of. Where these
            cancel, rounding errors are left.
        tolerance: the share in the place of 1e-6.
    """
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        largest = np.max(np.abs(b), initial=summands)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * largest)


def unlike(
    actual: dict[str, Any],
    expected: dict[str, Any],
    compare: Callable[[list[Any], list[Any]], None] = assert_close,
) -> dict[str, str]:
    """Return what `compare` says of the values in which two dicts differ, by name."""
    assert list(actual) == list(expected)
    found = {}
    for name, value in expected.items():
        try:
            compare(tf.nest.flatten(actual[name]), tf.nest.flatten(value))
        except AssertionError as error:
            found[name] = str(error)
    return found


def named(functions: Iterable[Any], values: Iterable[Any]) -> dict[str, Any]:
    """Return values by the names of the functions that they come from."""
    return {f.__name__: v for f, v in zip(functions, values, strict=True)}


def check_forms_and_values(plain: Any, ours: Any, feed: Any = None) -> None:
    """Check gradients of a graph against TensorFlow's, their dtypes and shapes too."""
    graph = flat(plain)[0].graph
    ge.verify(graph)
    assert forms(ours) == forms(plain)
    for p, o in zip(flat(plain), flat(ours), strict=True):
        assert o.dtype == p.dtype
        assert p.shape.is_compatible_with(o.shape)
    expected, actual = run(graph, [flat(plain), flat(ours)], feed)
    assert_close(actual, expected)


def plain_values(
    functions: Iterable[Any], ys: Sequence[Any], xs: Sequence[Any], tape: Any = None
) -> dict[str, Any]:
    """Return plain gradients by the names of functions, which a tape gives as well.

    `EAGER_SUMS` takes them first: gradients of a loop may change it.
    """

    def by_tape(is_first: bool) -> list[Any]:
        if tape is None or (tape is EAGER_SUMS) != is_first:
            return []
        return gradients(ys, xs, checkpoints=None, engine=tape)

    ours = by_tape(True)
    plain = tf.gradients(ys, xs)
    ours += by_tape(False)
    if tape is not None:
        check_forms_and_values(plain, ours)
    return run(plain[0].graph, named(functions, plain))


def copied(graph: tf.Graph) -> dict[str, tf.Operation]:
    """Return the copies that recomputation made, by the name of their original.

    For gradients that were taken once.
    """
    found: dict[str, tf.Operation] = {}
    for op in graph.get_operations():
        if op.name.startswith(SCOPE) and op.type not in _HELPERS:
            name = op.name[len(SCOPE) :]
            assert name not in found
            found[name] = op
    return found


def barriers(graph: tf.Graph) -> list[tf.Operation]:
    return _helpers(graph, "PlaceholderWithDefault", "barrier")


def gates(graph: tf.Graph) -> list[tf.Operation]:
    """Return the ops behind which segments begin, in order."""
    return _helpers(graph, "NoOp", "gate")


def waiting(graph: tf.Graph) -> list[tf.Operation]:
    """Return the ops that put a step in order."""
    ops = graph.get_operations()
    return [op for op in ops if op.name.startswith(f"{construction.ORDERED}/")]


def _helpers(graph: tf.Graph, op_type: str, name: str) -> list[tf.Operation]:
    return [
        op
        for op in graph.get_operations()
        if op.type == op_type and op.name.startswith(SCOPE + name)
    ]


def dependencies(graph: tf.Graph) -> nx.DiGraph:
    """Return data and control edges between ops, loop back edges left out."""
    result = nx.DiGraph()
    for op in graph.get_operations():
        result.add_node(op)
        for t in op.inputs:
            if t.op.type != "NextIteration":
                result.add_edge(t.op, op)
        for waited in op.control_inputs:
            result.add_edge(waited, op)
    return result


def check(gradients: Iterable[Any], report: Report, before: int) -> None:
    """Check all that must hold of a graph after gradients were taken once.

    Args:
        gradients: what was returned.
        report: what `last_report` says.
        before: the number of ops that the graph had before.
    """
    results = flat(gradients)
    if not results:
        return
    graph = results[0].graph
    ge.verify(graph)
    copies = copied(graph)
    recomputed = {op.name: op.segment for op in report.recomputed}
    assert set(copies) == set(recomputed)
    originals = {name: graph.get_operation_by_name(name) for name in copies}
    for name, copy in copies.items():
        check_copy(copy, originals[name])
    edges = dependencies(graph)
    check_order(edges, {copies[name]: recomputed[name] for name in copies})
    made = graph.get_operations()[before:]
    seeds = [op for op in made if op.name.startswith("gradients/Identity")]
    behind = set().union(*(nx.ancestors(edges, t.op) | {t.op} for t in results))
    ahead = set().union(*(nx.descendants(edges, op) for op in seeds))
    backward = [op for op in made if op in behind and op in ahead]
    check_readers(backward, report, set(originals.values()))


def check_copy(copy: tf.Operation, original: tf.Operation) -> None:
    """Check that a copy is one, and of an op that may run twice."""
    assert copy.type == original.type
    assert copy.device == original.device
    assert not original.op_def.is_stateful
    assert [t.dtype for t in copy.outputs] == [t.dtype for t in original.outputs]
    assert [t.shape for t in copy.outputs] == [t.shape for t in original.outputs]


def check_order(edges: nx.DiGraph, segments: dict[tf.Operation, int]) -> None:
    """Check that no copy runs early, nor needs what a later segment yields."""
    assert nx.is_directed_acyclic_graph(edges)
    newest: dict[tf.Operation, int] = {}
    delayed = {op for op in edges if op.name.startswith(SCOPE + "gate")}
    for op in nx.topological_sort(edges):
        behind = list(edges.predecessors(op))
        newest[op] = max([newest[p] for p in behind], default=-1)
        if not delayed.isdisjoint(behind):
            delayed.add(op)
        if op in segments:
            assert newest[op] <= segments[op], op.name
            assert op in delayed, f"{op.name} runs in the forward pass"
            newest[op] = segments[op]


def check_readers(
    backward: Iterable[tf.Operation], report: Report, originals: set[tf.Operation]
) -> None:
    """Check that no op of the backward pass holds what is recomputed."""
    kept = {tensor.name for tensor in report.kept}
    for op in backward:
        if op in originals or op.name.startswith((SCOPE, "offloaded/")):
            continue
        for t in op.inputs:
            assert t.op not in originals or t.name in kept, (op.name, t.name)
