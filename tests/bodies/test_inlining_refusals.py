"""What inlining refuses, what it leaves because of recursion, and damaged graphs."""

import random

import pytest
import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow.core.framework import function_pb2, graph_pb2

from geutil.bodies import inline_calls
from geutil.errors import GeutilError, TransformError
from tests.bodies.calling import calls_left, in_topological_order, run
from tests.model.mutations import mutate

FLOAT = tf.float32.as_datatype_enum


def add_call(nodes, name, function, inputs, results=1):
    node = nodes.add(name=name, op="PartitionedCall", input=inputs)
    node.attr["f"].func.name = function
    node.attr["Tin"].list.type.extend([FLOAT] * len(inputs))
    node.attr["Tout"].list.type.extend([FLOAT] * results)
    return node


def add_function(graph_def, name, calls, result=None):
    """Add a function that passes its argument through `calls`, one after another."""
    function = graph_def.library.function.add()
    function.signature.name = name
    function.signature.input_arg.add(name="x", type=FLOAT)
    function.signature.output_arg.add(name="y", type=FLOAT)
    last = "x"
    for i, called in enumerate(calls):
        if called == "Neg":
            node = function.node_def.add(name=f"neg{i}", op="Neg", input=[last])
            node.attr["T"].type = FLOAT
            last = f"neg{i}:y:0"
        else:
            add_call(function.node_def, f"call{i}", called, [last])
            last = f"call{i}:output:0"
    function.ret["y"] = result or last
    return function


def graph_calling(function):
    graph_def = graph_pb2.GraphDef()
    graph_def.versions.producer = 1000
    node = graph_def.node.add(name="x", op="Placeholder")
    node.attr["dtype"].type = FLOAT
    add_call(graph_def.node, "main", function, ["x"])
    node = graph_def.node.add(name="out", op="Neg", input=["main"])
    node.attr["T"].type = FLOAT
    return graph_def


def refused(graph_def, message, **options):
    before = graph_def.SerializeToString(deterministic=True)
    with pytest.raises(TransformError, match=message):
        inline_calls(graph_def, **options)
    assert graph_def.SerializeToString(deterministic=True) == before


def test_exponential_growth_is_refused_at_once():
    # No float holds the count.
    depth = 400
    graph_def = graph_calling(f"f{depth}")
    add_function(graph_def, "f0", ["Neg"])
    for i in range(depth):
        add_function(graph_def, f"f{i + 1}", [f"f{i}"] * 10)
    # Did it follow each call, this would never end.
    refused(graph_def, "more than 10,000,000 nodes")
    # Calls alone count, too: nothing else may be left of them.
    graph_def.library.function[0].ClearField("node_def")
    graph_def.library.function[0].ret["y"] = "x"
    refused(graph_def, "more than 10,000,000 nodes")
    graph_def = graph_calling("g")
    add_function(graph_def, "f", ["Neg", "Neg"])
    add_function(graph_def, "g", ["f", "Neg", "f"])
    # x, main, out; two calls and Neg in g; two Neg each in f.
    inline_calls(graph_def, limit=10)
    refused(graph_def, "more than 9 nodes", limit=9)


def test_more_bytes_than_a_protobuf_holds_are_refused():
    graph_def = graph_calling("f12")
    add_function(graph_def, "f0", ["Neg"]).node_def[0].attr["big"].s = b"x" * 2**20
    for i in range(12):
        add_function(graph_def, f"f{i + 1}", [f"f{i}"] * 2)
    refused(graph_def, "larger than the 2 GiB")


def test_very_deep_nesting():
    # More than Python's stack is deep.
    depth = 1200
    graph_def = graph_calling(f"f{depth}")
    add_function(graph_def, "f0", ["Neg"])
    for i in range(depth):
        function = add_function(graph_def, f"f{i + 1}", [f"f{i}", "Neg"])
        function.node_def[0].name = "PartitionedCall"
        function.node_def[1].input[0] = "PartitionedCall:output:0"
    inlined = inline_calls(graph_def)
    assert calls_left(inlined.graph_def) == []
    assert len(inlined.graph_def.node) == depth + 3
    assert in_topological_order(inlined.graph_def)
    (values,) = run(inlined.graph_def, [["out:0"]], {"x:0": 2.0})
    assert values == [2.0 if depth % 2 == 0 else -2.0]


def test_recursive_functions_and_those_of_lists_stay():
    graph_def = graph_calling("outer")
    add_function(graph_def, "outer", ["self", "Neg", "one", "leaf"])
    add_function(graph_def, "self", ["self", "leaf"])
    add_function(graph_def, "one", ["Neg", "two"])
    add_function(graph_def, "two", ["one", "leaf"])
    add_function(graph_def, "leaf", ["Neg"])
    inlined = inline_calls(graph_def)
    assert [(k.function, k.reason) for k in inlined.kept] == [
        ("self", "the function calls itself"),
        ("one", "the function calls itself"),
    ]
    assert len(calls_left(inlined.graph_def)) == 2
    left = {f.signature.name for f in inlined.graph_def.library.function}
    assert left == {"self", "one", "two", "leaf"}
    # So do functions of lists.
    graph_def = graph_calling("f")
    function = add_function(graph_def, "f", ["Neg"])
    function.signature.input_arg[0].number_attr = "N"
    (kept,) = inline_calls(graph_def).kept
    assert "list of tensors" in kept.reason


def test_damaged_calls_are_refused():
    graph_def = graph_calling("f")
    refused(graph_def, "'main' calls function 'f', which the library .* not hold")
    add_function(graph_def, "f", ["Neg", "g"])
    refused(graph_def, "'call1' calls function 'g'")
    add_function(graph_def, "g", ["Neg"])
    inline_calls(graph_def)
    graph_def.node[1].input.append("x")
    refused(graph_def, "'main' calls function 'f' with 2 arguments, .* has 1")
    del graph_def.node[1].input[:]
    refused(graph_def, "'main' calls function 'f' with 0 arguments, .* has 1")
    graph_def.node[1].input.append("x")
    graph_def.node[1].attr["Tout"].list.type.append(FLOAT)
    refused(graph_def, "'main' calls function 'f' with 2 results, .* has 1")
    del graph_def.node[1].attr["Tout"].list.type[0]
    refused(
        graph_def, "protected name 'nothing:0' is not", protected_names=["nothing:0"]
    )
    graph_def.node[2].name = "x"
    refused(graph_def, "two nodes of the graph have the same name")


def test_calls_that_depend_on_themselves_are_refused():
    graph_def = graph_calling("f")
    add_function(graph_def, "f", [])
    graph_def.node[1].input[0] = "main"
    refused(graph_def, "'main' depends on itself")
    graph_def = graph_calling("f")
    add_function(graph_def, "f", [])
    graph_def.node[1].input.append("^main")
    refused(graph_def, "'main' waits for itself", protected_names=["main"])


def test_endless_choices_of_attributes_are_refused():
    graph_def = graph_calling("f")
    graph_def.node[1].op = "f"
    function = add_function(graph_def, "f", [])
    function.signature.attr.add(name="F", type="func")
    node = function.node_def.add(name="again", op="f", input=["x"])
    node.attr["F"].func.name = "f"
    node.attr["F"].func.attr["F"].placeholder = "F"
    function.ret["y"] = "again:y:0"
    graph_def.node[1].attr["F"].func.name = "f"
    refused(graph_def, "more than 1000 choices")


def test_polymorphic_functions():
    graph_def = graph_calling("f")
    function = add_function(graph_def, "f", ["Neg"])
    function.signature.attr.add(name="T", type="type")
    for arg in (function.signature.input_arg[0], function.signature.output_arg[0]):
        arg.ClearField("type")
        arg.type_attr = "T"
    function.node_def[0].attr["T"].placeholder = "T"
    nodes = graph_def.node
    nodes[1].op = "f"
    nodes[1].attr["T"].type = FLOAT
    for name, dtype in [("i", tf.int32), ("j", tf.int32)]:
        source = nodes.add(name=name, op="Placeholder")
        source.attr["dtype"].type = dtype.as_datatype_enum
        call = nodes.add(name=f"call_{name}", op="f", input=[name])
        call.attr["T"].type = dtype.as_datatype_enum
    inlined = inline_calls(graph_def)
    names = ["out:0", *(inlined.tensors[f"call_{n}:0"] for n in "ij")]
    feed = {"x:0": 1.5, "i:0": 7, "j:0": 8}
    (values,) = run(inlined.graph_def, [names], feed)
    assert values == [1.5, -7, -8]


def test_damaged_bytes_do_not_crash():
    @tf.function(autograph=False)
    def inner(x):
        return tf.split(x, 2)[1], tf.reduce_sum(x)

    @tf.function(autograph=False)
    def outer(x):
        y, z = inner(x + 1.0)
        return inner(x)[0] * y, z

    with tf.Graph().as_default() as graph:
        tf.identity(outer(tf.compat.v1.placeholder(tf.float32, [4]))[0])
    data = graph.as_graph_def().SerializeToString()
    randomly = random.Random(7)
    counts = {"read": 0, "refused": 0}
    for _ in range(2500):
        damaged = graph_pb2.GraphDef()
        try:
            damaged.ParseFromString(mutate(data, randomly)[1])
        except DecodeError:
            continue
        counts["read"] += 1
        try:
            inline_calls(damaged, limit=10_000)
        except GeutilError:
            counts["refused"] += 1
    assert counts["read"] > 300
    assert counts["refused"] > 50


def test_the_library_keeps_registered_gradients():
    graph_def = graph_calling("f")
    add_function(graph_def, "f", ["Neg"])
    add_function(graph_def, "gradient", ["f"])
    add_function(graph_def, "unused", ["f"])
    graph_def.library.registered_gradients.add(
        gradient_func="gradient", registered_op_type="CustomGradient-1"
    )
    library = inline_calls(graph_def).graph_def.library
    assert library.registered_gradients == graph_def.library.registered_gradients
    assert [f.signature.name for f in library.function] == ["f", "gradient"]
    assert isinstance(library.function[0], function_pb2.FunctionDef)
