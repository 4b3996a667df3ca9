"""Names of inlined nodes."""

import tensorflow as tf

from geutil.bodies import inline_calls
from tests.bodies.calling import node_names
from tests.bodies.test_inlining import concrete, placeholder, raw_call

VECTOR = tf.TensorSpec([2], tf.float32)


# Where the functions of two calls want the same names, they move into such scopes.
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
# Nodes of bodies: whether they get another number where their names are taken, rather
# than a scope with the rest of the body.
AUTOMATIC = {
    ("NoOp", "NoOp"): True,
    ("Identity_12", "Identity"): True,
    ("add_1", "AddV2"): True,
    ("strided_slice", "StridedSlice"): True,
    ("dense/NoOp", "NoOp"): False,
    ("conv1", "Conv2D"): False,
    ("Conv2D_1", "Conv2D"): True,
}
# Names and types of calls, and the scopes of their bodies where nothing is in the way.
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


def calling(calls, function="function", node=None, before=()):
    """Return the names of the nodes that calls of one function become.

    Args:
        calls: the name and the type of each; types other than TensorFlow's own are
            functions, as files of version 1 have them.
        function: the name of the function that the others call.
        node: the name and the type of a node that its body gets besides "a" to "e".
        before: names that are taken.
    """
    graph_def = tf.compat.v1.GraphDef()
    graph_def.node.add(name="x", op="Placeholder").attr["dtype"].type = FLOAT
    for name in before:
        graph_def.node.add(name=name, op="Placeholder").attr["dtype"].type = FLOAT
    called = {op if op not in CALLS else function for _, op in calls}
    for name in called:
        definition = graph_def.library.function.add()
        signature = definition.signature
        signature.name = name
        signature.input_arg.add(name="x", type=FLOAT)
        signature.output_arg.add(name="y", type=FLOAT)
        definition.ret["y"] = "a:y:0"
        bodies = [(letter, "Neg") for letter in "abcde"] + [node] * bool(node)
        for inner, op in bodies:
            made = definition.node_def.add(name=inner, op=op)
            made.input.extend(["x"] * INPUTS[op])
            made.attr["T"].type = FLOAT
    for name, op in calls:
        made = graph_def.node.add(name=name, op=op, input=["x"])
        if op in CALLS:
            made.attr["f"].func.name = function
            for side in ("Tin", "Tout"):
                made.attr[side].list.type.append(FLOAT)
    kept = {n.name for n in graph_def.node}
    outputs = [f"{name}:0" for name, _ in calls]
    inlined = inline_calls(graph_def, protected_names=outputs)
    return [name for name in node_names(inlined) if name not in kept]


FLOAT = tf.float32.as_datatype_enum
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
INPUTS = {
    "NoOp": 0,
    "Identity": 1,
    "Neg": 1,
    "AddV2": 2,
    "Conv2D": 2,
    "StridedSlice": 4,
}


def test_scopes_of_functions_whose_names_are_in_each_others_way():
    calls = [("PartitionedCall", CALLS[0]), ("PartitionedCall_1", CALLS[0])]
    found = {name: calling(calls, name) for name in READABLE}
    scopes = {
        n: [*dict.fromkeys(i.rpartition("/")[0] for i in found[n])] for n in found
    }
    assert {name: first for name, (first, _) in scopes.items()} == READABLE


def test_names_that_say_no_more_than_the_type_of_an_op():
    call = [("PartitionedCall", "PartitionedCall")]
    found = {}
    for name, op in AUTOMATIC:
        names = calling(call, node=(name, op), before=[name])
        assert len(names) == 6
        found[name, op] = names[:5] == [*"abcde"]
        if not found[name, op]:
            assert names == [f"function/{inner}" for inner in (*"abcde", name)]
    assert found == AUTOMATIC


def test_scopes_of_calls():
    found = {call: calling([call]) for call in SCOPES}
    wanted = {c: [f"{scope}{n}" for n in "abcde"] for c, scope in SCOPES.items()}
    assert found == wanted


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
