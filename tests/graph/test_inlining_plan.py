"""Names of inlined nodes."""

import tensorflow as tf

from geutil.graph.inlining import inline_calls
from geutil.graph.inlining_plan import call_scope, is_automatic, readable
from tests.graph.calling import node_names
from tests.graph.test_inlining import concrete, placeholder, raw_call

VECTOR = tf.TensorSpec([2], tf.float32)


READABLE = {
    "__inference_dense_layer_call_fn_1234": "dense_layer_call_fn",
    "__inference___call___240": "call",
    "__inference__wrapped_model_45": "wrapped_model",
    "__forward_block_2_99": "block_2",
    "__inference___backward_f_12_34": "f",
    "__inference_<lambda>_7": "lambda",
    "__inference_forward_12": "forward",
    "__inference_forward_pass_12": "forward_pass",
    "Layer_1": "Layer_1",
    "___": "call",
}
AUTOMATIC = {
    ("NoOp", "NoOp"): True,
    ("Identity_12", "Identity"): True,
    ("add_1", "AddV2"): True,
    ("strided_slice", "StridedSlice"): True,
    ("dense/NoOp", "NoOp"): False,
    ("conv1", "Conv2D"): False,
    ("Conv2D_1", "Conv2D"): True,
}
SCOPES = {
    ("PartitionedCall", "PartitionedCall"): "",
    ("StatefulPartitionedCall_3", "StatefulPartitionedCall"): "",
    ("m/d/StatefulPartitionedCall", "StatefulPartitionedCall"): "m/d/",
    ("model/dense", "StatefulPartitionedCall"): "model/dense/",
    ("Foo_1", "Foo"): "",
    ("scope/f", "__inference_f_12"): "scope/",
    ("dense_1", "PartitionedCall"): "dense_1/",
}


def test_names_of_functions_and_scopes_of_calls():
    assert {name: readable(name) for name in READABLE} == READABLE
    assert {case: is_automatic(*case) for case in AUTOMATIC} == AUTOMATIC
    assert {case: call_scope(*case) for case in SCOPES} == SCOPES


def build_names(calls, before=()):
    """Return the names that the bodies of calls get: (name, function) each."""

    def layer(x):
        return tf.negative(x, name="dense/neg") + tf.constant(1.0, name="one")

    def automatic(x):
        return tf.negative(x) * 2.0

    def named(x):
        for name in "abcdef":
            x = tf.negative(x, name=name)
        return x

    def wrapper(x):
        return tf.identity(functions["named"](x))

    functions = {
        "named": concrete(named, VECTOR),
        "layer": concrete(layer, VECTOR),
        "automatic": concrete(automatic, VECTOR),
    }
    functions["wrapper"] = concrete(wrapper, VECTOR)
    with tf.Graph().as_default() as graph:
        x = placeholder()
        for name in before:
            tf.identity(x, name=name)
        for name, function in calls:
            raw_call(name, functions, function, [x], [tf.float32])
    graph_def = graph.as_graph_def()
    original = [n.name for n in graph_def.node]
    names = node_names(
        inline_calls(graph_def, protected_names=[f"{c}:0" for c, _ in calls])
    )
    called = {c for c, _ in calls}
    assert [n for n in names if n in original] == [
        n for n in original if n not in called
    ]
    return [n for n in names if n not in original]


def test_a_body_keeps_its_names():
    names = build_names([("PartitionedCall", "layer")])
    assert names == ["dense/neg", "one", "add", "Identity"]


def test_a_call_gives_its_name():
    names = build_names([("block", "layer"), ("other/PartitionedCall", "layer")])
    assert names == [
        *("block/dense/neg", "block/one", "block/add", "block/Identity"),
        *("other/dense/neg", "other/one", "other/add", "other/Identity"),
    ]


def test_calls_in_each_others_way_all_move():
    calls = [("PartitionedCall", "layer"), ("PartitionedCall_1", "layer")]
    names = build_names(calls)
    assert {n.partition("/")[0] for n in names} == {"layer", "layer_1"}
    assert len(names) == 8


def test_scopes_that_are_taken_are_not_mixed():
    calls = [("PartitionedCall", "layer"), ("PartitionedCall_1", "layer")]
    names = build_names(calls, ["layer", "layer_1/one"])
    assert {n.partition("/")[0] for n in names} == {"layer_2", "layer_3"}


def test_automatic_names_get_another_number():
    names = build_names([("PartitionedCall", "wrapper")], ["Identity", "Identity_1"])
    assert names == [*"abcdef", "Identity_4", "Identity_2", "Identity_3"]


def test_a_body_of_automatic_names_moves():
    names = build_names([("PartitionedCall", "automatic")], ["Neg"])
    assert {n.partition("/")[0] for n in names} == {"automatic"}
