"""The order of the ops of TFLite files: what may move, and what a moved file holds."""

import pytest
import tensorflow as tf

from geutil.tflite.order import file_subgraphs, fixed_order_reason, with_op_order
from geutil.tflite.run import packed, schema, unpacked
from tests.settings import needs_eager

pytestmark = needs_eager


def converted(compute, *specs, variables=None):
    function = tf.function(compute, input_signature=specs)
    concrete = function.get_concrete_function()
    converter = tf.lite.TFLiteConverter.from_concrete_functions([concrete], variables)
    converter.experimental_enable_resource_variables = variables is not None
    return converter.convert()


@pytest.fixture(scope="module")
def branching():
    def compute(x):
        return tf.exp(x) + tf.cos(x) * tf.nn.relu(x)

    return converted(compute, tf.TensorSpec([2, 3], name="x"))


def test_the_ops_move_and_nothing_else(branching):
    (graph,) = file_subgraphs(branching)
    assert sorted(graph.kinds) == ["ADD", "COS", "EXP", "MUL", "RELU"]
    product = graph.kinds.index("MUL")
    others = [i for i in reversed(range(4)) if i != product]
    order = [*others, product, 4]
    moved = with_op_order(branching, {0: order})
    assert len(moved) == len(branching)
    (after,) = file_subgraphs(moved)
    assert after.kinds == tuple(graph.kinds[i] for i in order)
    assert after.reads == tuple(graph.reads[i] for i in order)
    assert after.writes == tuple(graph.writes[i] for i in order)
    assert (after.names, after.constants) == (graph.names, graph.constants)
    assert with_op_order(moved, {0: [order.index(i) for i in range(5)]}) == branching


def test_orders_that_cannot_run_are_refused(branching):
    with pytest.raises(ValueError, match=r"op 4 \(ADD\) .* cannot run before op "):
        with_op_order(branching, {0: [4, 0, 1, 2, 3]})
    with pytest.raises(ValueError, match="each of its 5 ops once"):
        with_op_order(branching, {0: [0, 1, 2, 3]})
    for function in (file_subgraphs, fixed_order_reason):
        with pytest.raises(ValueError, match="no TFLite file"):
            function(b"no file at all")


def test_ops_with_a_state_keep_their_order():
    class Counter(tf.Module):
        def __init__(self):
            self.total = tf.Variable(tf.zeros([2]))

    counter = Counter()

    def compute(x):
        before = counter.total.read_value()
        counter.total.assign_add(x)
        return tf.exp(before) + tf.cos(x)

    blob = converted(compute, tf.TensorSpec([2]), variables=counter)
    graph, *_ = file_subgraphs(blob)
    kinds = [graph.kinds[i] for i in graph.stateful]
    assert kinds[0] == "CALL_ONCE"
    assert {"READ_VARIABLE", "ASSIGN_VARIABLE"} < set(kinds)
    pairs = zip(graph.stateful, graph.stateful[1:], strict=False)
    assert set(pairs) <= set(graph.edges)


@pytest.mark.parametrize(
    "name", ["model_control_dependencies", "OfflineMemoryAllocation"]
)
def test_metadata_that_counts_ops_fixes_their_order(branching, name):
    assert fixed_order_reason(branching) is None
    model = unpacked(branching)
    entry = schema().MetadataT()
    entry.name, entry.buffer = name, 0
    model.metadata = [*(model.metadata or []), entry]
    assert "metadata" in fixed_order_reason(packed(model))
