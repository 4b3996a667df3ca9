"""Names of inlined nodes."""

import tensorflow as tf

from geutil.bodies import inline_calls
from geutil.bodies.inlining_plan import call_scope, is_automatic, readable
from tests.bodies.calling import node_names
from tests.bodies.test_inlining import concrete, placeholder, raw_call

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
    # Longer ones nobody reads.
    ("a" * 1000, "f"): "a" * 1000 + "/",
    ("a" * 1001, "f"): "",
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


ONE, TWO = ("PartitionedCall", "layer"), ("PartitionedCall_1", "layer")
BODY = ["dense/neg", "one", "add", "Identity"]
# Calls, names that are taken before, and the names of what the bodies hold.
NAMES = [
    ([ONE], [], BODY),
    ([("block", "layer")], [], [f"block/{name}" for name in BODY]),
    ([("other/PartitionedCall", "layer")], [], [f"other/{name}" for name in BODY]),
    # Calls that are in each other's way all move; scopes that are taken are not mixed.
    ([ONE, TWO], [], [f"layer{i}/{name}" for i in ("", "_1") for name in BODY]),
    (
        [ONE, TWO],
        ["layer", "layer_1/one"],
        [f"layer{i}/{name}" for i in ("_2", "_3") for name in BODY],
    ),
    # Automatic names get another number; a body of no others moves.
    (
        [("PartitionedCall", "wrapper")],
        ["Identity", "Identity_1"],
        [*"abcdef", "Identity_4", "Identity_2", "Identity_3"],
    ),
    (
        [("PartitionedCall", "automatic")],
        ["Neg"],
        ["automatic/Neg", "automatic/mul/y", "automatic/mul", "automatic/Identity"],
    ),
]


def test_names_of_bodies():
    found = [(calls, before, build_names(calls, before)) for calls, before, _ in NAMES]
    assert found == NAMES
