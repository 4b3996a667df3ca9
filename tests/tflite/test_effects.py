"""The order of the ops of TFLite files: what may move, and what a moved file holds."""

import itertools

import pytest
import tensorflow as tf

from geutil import tflite
from geutil.errors import TFLiteError
from geutil.tflite.effects import (
    dependencies,
    fixed_order_reason,
    reorder,
)
from geutil.tflite.parts import Buffer
from tests import tflite_files
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


def moved(blob, order):
    """Return a file whose first subgraph runs in another order."""
    file = tflite.open(blob)
    reorder(file, file.graphs[0], order)
    return file.to_bytes()


def ops_by_names(blob):
    """Return the ops of a file, and the names of what they read and make."""
    return [
        (op.kind, [t.name for t in op.reads], [t.name for t in op.outputs])
        for op in tflite.open(blob).ops
    ]


def test_the_ops_move_and_nothing_else(branching):
    ops = ops_by_names(branching)
    kinds = [kind for kind, *_ in ops]
    assert sorted(kinds) == ["ADD", "COS", "EXP", "MUL", "RELU"]
    product = kinds.index("MUL")
    others = [i for i in reversed(range(4)) if i != product]
    order = [*others, product, 4]
    other = moved(branching, order)
    assert ops_by_names(other) == [ops[i] for i in order]
    before, after = (tflite_files.unpacked(blob) for blob in (branching, other))
    names = [[t.name for t in m.subgraphs[0].tensors] for m in (before, after)]
    assert names[0] == names[1]
    back = moved(other, [order.index(i) for i in range(5)])
    assert back == tflite.open(branching).to_bytes()


def test_orders_that_cannot_run_are_refused(branching):
    file = tflite.open(branching)
    before = file.to_bytes()
    with pytest.raises(TFLiteError, match=r"op 4 \(ADD\) .* cannot run before op "):
        reorder(file, file.graphs[0], [4, 0, 1, 2, 3])
    with pytest.raises(TFLiteError, match="each of its 5 ops once"):
        reorder(file, file.graphs[0], [0, 1, 2, 3])
    assert file.to_bytes() == before


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
    file = tflite.open(blob)
    graph = file.graphs[0]
    kinds = {"CALL_ONCE", "READ_VARIABLE", "ASSIGN_VARIABLE"}
    stateful = [at for at, op in enumerate(graph.ops) if op.kind in kinds]
    assert {graph.ops[at].kind for at in stateful} == kinds
    assert graph.ops[stateful[0]].kind == "CALL_ONCE"
    pairs = set(dependencies(graph))
    before = {at: {a for a, b in pairs if b == at} for at in range(len(graph.ops))}
    for earlier, later in itertools.pairwise(stateful):
        known, waiting = set(), [later]
        while waiting:
            new = before[waiting.pop()] - known
            known |= new
            waiting += new
        assert earlier in known


@pytest.mark.parametrize(
    "name", ["model_control_dependencies", "OfflineMemoryAllocation"]
)
def test_metadata_that_counts_ops_fixes_their_order(branching, name):
    file = tflite.open(branching)
    assert fixed_order_reason(file) is None
    file.metadata[name] = Buffer()
    assert "metadata" in fixed_order_reason(tflite.open(file.to_bytes()))
