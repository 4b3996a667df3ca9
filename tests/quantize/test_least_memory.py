"""Files in the order of the least arena, as the interpreter plans and runs them."""

import itertools
import random

import numpy as np
import pytest
import tensorflow as tf

from geutil import model, tflite
from geutil.errors import ArgumentTypeError, QuantizeError
from geutil.quantize import arena_bytes, least_memory_order, to_int8
from testdata.irregular_cells import irregular_network
from tests.interpreter import new_interpreter
from tests.quantize.small_networks import normal, prepared
from tests.settings import needs_eager
from tests.tflite.declared import buffer_of
from tests.tflite_files import unpacked

pytestmark = needs_eager
RUNTIMES = ("litert", "reference", "micro")
VARIABLES = ("READ_VARIABLE", "ASSIGN_VARIABLE")
STATEFUL = ("CALL_ONCE", "VAR_HANDLE", *VARIABLES)
ROW = tf.TensorSpec([1, 64], name="x")


def converted(compute, *specs, variables=None):
    function = tf.function(compute, input_signature=specs)
    concrete = function.get_concrete_function()
    converter = tf.lite.TFLiteConverter.from_concrete_functions([concrete], variables)
    converter.experimental_enable_resource_variables = variables is not None
    return converter.convert()


def ops_by_names(blob):
    """Return the ops of a file, and the names of what they read and make."""
    return [
        (op.kind, [t.name for t in op.reads], [t.name for t in op.outputs])
        for op in tflite.open(blob).ops
    ]


@pytest.fixture(scope="module")
def irregular():
    network = irregular_network(4, cells=1, pixels=16, nodes=8)
    return converted(network, tf.TensorSpec([1, 16, 16, 3]))


def results(blob, runs=2, seed=0):
    """The outputs of a file in several runs, which share its state."""
    chance = np.random.default_rng(seed)
    interpreter = new_interpreter(blob)
    interpreter.allocate_tensors()
    found = []
    for _ in range(runs):
        for detail in interpreter.get_input_details():
            value = 20 * chance.normal(size=detail["shape"])
            interpreter.set_tensor(detail["index"], value.astype(detail["dtype"]))
        interpreter.invoke()
        found += [
            interpreter.get_tensor(detail["index"]).copy()
            for detail in interpreter.get_output_details()
        ]
    return found


def same_results(a, b):
    pairs = zip(results(a), results(b), strict=True)
    return all(x.tobytes() == y.tobytes() for x, y in pairs)


def shuffled(blob, seed):
    """Return a file whose ops run in another order, and the order."""
    file = tflite.open(blob)
    graph = file.graphs[0]
    count = len(graph.ops)
    chance, done, order = random.Random(seed), set(), []
    place = {op: i for i, op in enumerate(graph.ops)}
    needs = {
        i: {place[t.producer] for t in op.reads if t.producer is not None}
        for op, i in place.items()
    }
    # Ops with a state keep their order.
    stateful = [i for op, i in place.items() if op.kind in STATEFUL]
    for before, after in itertools.pairwise(stateful):
        needs[after].add(before)
    while len(order) < count:
        ready = [i for i in needs if i not in done and needs[i] <= done]
        order.append(chance.choice(ready))
        done.add(order[-1])
    graph.set_ops([graph.ops[i] for i in order])
    return file.to_bytes(), order


def test_the_interpreter_plans_what_is_computed_in_any_order():
    m = model.open(irregular_network(3, cells=1, pixels=16, nodes=7)).set_batch_size(1)
    images = dict.fromkeys(m.inputs, normal(1, 16, 16, 3))
    blob = to_int8(prepared(m, images))
    for seed in range(3):
        drawn, _ = shuffled(blob, seed)
        (planned,) = least_memory_order(drawn, iterations=1).subgraphs
        for runtime in ("litert", "reference"):
            measured = arena_bytes(drawn, reference=runtime == "reference")
            assert planned.arenas_before[runtime] == measured, (seed, runtime)
        assert same_results(blob, drawn), seed
    found = least_memory_order(blob, iterations=2000)
    assert found.arena_after <= found.arena_before
    assert same_results(blob, found.blob)


@pytest.mark.parametrize("runtime", [None, *RUNTIMES])
def test_a_smaller_arena_and_the_same_results(irregular, runtime):
    # Converters write good orders for some networks; this one is drawn.
    drawn, _ = shuffled(irregular, 1)
    found = least_memory_order(drawn, runtime=runtime, iterations=5000)
    assert found.runtime == (runtime or "litert")
    assert found.arena_after < 0.9 * found.arena_before
    assert found.lower_bound <= found.arena_after
    assert same_results(drawn, found.blob)
    # Nothing but the order of the ops is another.
    (graph,) = found.subgraphs
    ops = ops_by_names(drawn)
    assert ops_by_names(found.blob) == [ops[i] for i in graph.order]
    tensors = [unpacked(blob).subgraphs[0].tensors for blob in (drawn, found.blob)]
    assert [t.name for t in tensors[0]] == [t.name for t in tensors[1]]
    if found.runtime != "micro":
        is_reference = runtime == "reference"
        assert found.arena_before == arena_bytes(drawn, reference=is_reference)
        assert found.arena_after == arena_bytes(found.blob, reference=is_reference)
    if runtime is None:
        for each in RUNTIMES:
            assert graph.arenas_after[each] <= graph.arenas_before[each]


def test_the_order_that_was_found_is_kept_and_what_is_alive_at_the_peak(irregular):
    found = least_memory_order(irregular, iterations=2000)
    assert least_memory_order(irregular, iterations=2000).blob == found.blob
    again = least_memory_order(found.blob, iterations=2000)
    assert again.arena_after <= found.arena_after
    (graph,) = found.subgraphs
    assert sum(t.size for t in found.peak_tensors_before) == graph.peak_before
    assert sum(t.size for t in found.peak_tensors_after) == graph.peak_after
    assert graph.peak_after <= found.arena_after
    text = str(found)
    assert f"{found.arena_before:,} -> {found.arena_after:,} bytes" in text
    assert all(t.name in text for t in found.peak_tensors_after)


def test_the_states_of_variables_and_of_loops_are_the_same():
    class Two(tf.Module):
        def __init__(self):
            self.v = tf.Variable(tf.zeros([1, 64]))
            self.w = tf.Variable(tf.ones([1, 64]))

    two = Two()

    def compute(x):
        kept = tf.tile(x, [1, 8])
        two.v.assign_add(x)
        wide = tf.tile(tf.cos(two.v.read_value()), [1, 16])
        two.w.assign(two.w * 2.0 + tf.reduce_sum(wide) * 1e-3)
        return tf.reduce_max(kept, 1) + tf.reduce_max(wide, 1) + two.w[0, 0]

    blob = converted(compute, ROW, variables=two)
    for seed in range(3):
        drawn, _ = shuffled(blob, seed)
        assert same_results(blob, drawn)
        found = least_memory_order(drawn, iterations=2000)
        assert found.arena_after <= found.arena_before
        assert len(found.subgraphs) == 2
        assert same_results(blob, found.blob)
    assert kinds_with_state(blob) == kinds_with_state(found.blob)


def kinds_with_state(blob):
    ops = tflite.open(blob).graphs[0].ops
    return [op.kind for op in ops if op.kind in {"CALL_ONCE", *VARIABLES}]


def test_the_body_of_a_loop_is_reordered():
    def body(i, y):
        kept = tf.tile(y, [1, 8])
        small = tf.reduce_max(tf.exp(tf.tile(y, [1, 32])), 1, keepdims=True)
        kept = tf.reduce_max(kept, 1, keepdims=True)
        return i + 1, (kept + small * 1e-3) * y

    blob = converted(lambda x: tf.while_loop(lambda i, y: i < 3, body, [0, x])[1], ROW)
    found = least_memory_order(blob, runtime="micro")
    assert any(graph.reason is None for graph in found.subgraphs)
    assert same_results(blob, found.blob)


def test_chains_sizes_that_are_not_known_and_counted_ops_leave_the_order(irregular):
    tied = {}
    for name in ("OfflineMemoryAllocation", "model_control_dependencies"):
        file = tflite.open(irregular)
        file.metadata[name] = buffer_of(b"")
        tied[name] = file.to_bytes()
    chain = converted(lambda x: tf.cos(tf.exp(x)) * 2.0, ROW)
    unknown = converted(lambda x: tf.reshape(x[x > 0], [-1, 1]) * 2.0, ROW)
    for blob, reason in [
        (chain, "no order that was found has a smaller arena"),
        (unknown, "known only when the file runs"),
        (tied["OfflineMemoryAllocation"], "was planned for these ops"),
        (tied["model_control_dependencies"], "ties ops by their places"),
    ]:
        found = least_memory_order(blob)
        assert found.blob == blob
        assert found.proven == (blob is chain)
        assert reason in found.subgraphs[0].reason
        assert reason in str(found)


def test_refusals(irregular):
    with pytest.raises(ArgumentTypeError, match=r"given as bytes, not as .*str"):
        least_memory_order("model.tflite")
    with pytest.raises(QuantizeError, match="TFLite cannot run the file"):
        least_memory_order(b"no file at all")
    with pytest.raises(QuantizeError, match="cannot run the file"):
        arena_bytes(b"")
    with pytest.raises(QuantizeError, match="no runtime 'tpu'; take one of litert"):
        least_memory_order(irregular, runtime="tpu")
    with pytest.raises(ArgumentTypeError, match=r"number of states, not .*str"):
        least_memory_order(irregular, iterations="many")
