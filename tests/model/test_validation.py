import itertools
import re
from pathlib import Path

import pytest
import tensorflow as tf
from google.protobuf import text_format

from geutil import model
from geutil.errors import ModelError
from tests.model.samples import frozen_graph_def
from tests.settings import control_flow

tf1 = tf.compat.v1
TESTDATA = Path(__file__).parents[2] / "testdata"
TEXTS = [p for p in sorted(TESTDATA.glob("*.pbtxt")) if ".meta." not in p.name]


def parse(text):
    # Merge allows several libraries, Parse does not.
    return text_format.Merge(text, tf1.GraphDef())


FLOAT, INT = "type: DT_FLOAT", "type: DT_INT32"
SCALAR, VECTOR, MATRIX = (
    f"tensor_shape {{ {'dim { size: 1 } ' * rank} }}" for rank in range(3)
)


def node(name, op, inputs=(), **attributes):
    inputs = " ".join(f'input: "{name}"' for name in inputs)
    attributes = " ".join(
        f'attr {{ key: "{key}" value {{ {value} }} }}'
        for key, value in attributes.items()
    )
    return f'node {{ name: "{name}" op: "{op}" {inputs} {attributes} }}'


def const(name="c", dtype="DT_FLOAT", tensor="float_val: 1.0", value_dtype=None):
    value = f"tensor {{ dtype: {value_dtype or dtype} {tensor} }}"
    return node(name, "Const", dtype=f"type: {dtype}", value=value)


def unary(name, of, op="Neg", dtype="DT_FLOAT"):
    return node(name, op, of, T=f"type: {dtype}")


def placeholder(name, dtype="DT_FLOAT", shape=""):
    return node(
        name, "Placeholder", dtype=f"type: {dtype}", shape=f"shape {{ {shape} }}"
    )


def function(name, nodes, ret="y:y:0", more=""):
    return f"""
    library {{ function {{
      signature {{ name: "{name}"
        input_arg {{ name: "x" type: DT_FLOAT }}
        output_arg {{ name: "r" type: DT_FLOAT }} }}
      {nodes.replace("node {", "node_def {")}
      ret {{ key: "r" value: "{ret}" }} {more} }} }}"""


def call(name, of, callee):
    types = "list { type: DT_FLOAT }"
    f = f'func {{ name: "{callee}" }}'
    return node(name, "PartitionedCall", [of], Tin=types, Tout=types, f=f)


REFUSED = {
    "no legal name": const(name=""),
    "'a b', which is no legal name": const(name="a b"),
    "two nodes are called 'c'": const() + const(),
    r"node 'x' \(Nonsense\).*tf\.load_op_library": node("x", "Nonsense"),
    r"'y' \(Neg\): its input 'z' does not exist": unary("y", ["z"]),
    "waits for 'z'": const() + unary("y", ["c", "^z"]),
    "comes after a control": const() + unary("y", ["^c", "c"]),
    "'c:1' does not exist: .* 1 out": const() + unary("y", ["c:1"]),
    "takes 1 inputs, but has 0": unary("y", []),
    "takes 1 inputs, but has 2": const() + unary("y", ["c", "c"]),
    "its input 'c' is of type int32; taken is float32": const(
        dtype="DT_INT32", tensor="int_val: 1"
    )
    + unary("y", ["c"]),
    "'value' is missing": node("c", "Const"),
    "'dtype' is of type i; declared: type": node("p", "Placeholder", dtype="i: 1"),
    "'dtype' is of type none at all": node("p", "Placeholder", dtype=""),
    "'T' lists values of type i": node("n", "IdentityN", T="list { i: 1 }"),
    "'T' is string; accepted: .*float32": const(
        dtype="DT_STRING", tensor='string_val: "a"'
    )
    + unary("y", ["c"], dtype="DT_STRING"),
    "'N' is or has 0; at least 1": const() + node("m", "AddN", "c", N="i: 0", T=FLOAT),
    "data type 77": node("p", "Placeholder", dtype="type: 77"),
    "'dtype' is of type placeholder": node(
        "p", "Placeholder", dtype='placeholder: "T"'
    ),
    "'p'.*negative size": placeholder("p", shape="dim { size: -2 }"),
    f"'num' asks for {2**31} tensors": const()
    + node("s", "Unpack", "c", num=f"i: {2**31}", T=FLOAT),
    "a constant of .* bytes": const(
        tensor=f"tensor_shape {{ dim {{ size: {2**40} }} }} float_val: 1"
    ),
    "too many elements": const(
        tensor=f"tensor_shape {{ {f'dim {{ size: {2**40} }}' * 2} }}"
    ),
    "unknown shape": const(tensor="tensor_shape { unknown_rank: true }"),
    "'c'.*negative size": const(tensor="tensor_shape { dim { size: -1 } }"),
    "holds 2 bytes, .* asks for 8": const(
        tensor=r'tensor_shape { dim { size: 2 } } tensor_content: "\000\000"'
    ),
    "holds 2 values": const(tensor="float_val: 1 float_val: 2"),
    "its value is int32, but its type is float32": const(
        tensor="int_val: 1", value_dtype="DT_INT32"
    ),
    "function 'nobody'": const() + call("y", "c", "nobody"),
    "nodes wait for each other: (a -> b -> a|b -> a -> b)": unary("a", ["b"])
    + unary("b", ["a"]),
    "wait for each other: a": const() + unary("a", ["c", "^a"]),
    "two functions are called 'f'": function("f", unary("y", ["x"])) * 2,
    r"function 'f': node 'y' \(Neg\): its input 'z:y:0' does not exist": function(
        "f", unary("y", ["z:y:0"])
    ),
    # The input of a body names an output.
    "its input 'z' does not exist": function(
        "f", unary("z", ["x"]) + unary("y", ["z"])
    ),
    r"has the outputs \['y'\]": function(
        "f", unary("z", ["x"]) + unary("y", ["z:q:0"])
    ),
    "its result 'r' is not computed": function("f", unary("y", ["x"])).replace(
        'key: "r"', 'key: "s"'
    ),
    "its result 'r': its input 'q:y:0' does not exist": function(
        "f", unary("y", ["x"]), ret="q:y:0"
    ),
    "waits for 'b'": function(
        "f", unary("y", ["x"]), more='control_ret { key: "a" value: "b" }'
    ),
    "function 'f': nodes wait for each other": function(
        "f", unary("y", ["z:y:0"]) + unary("z", ["y:y:0"])
    ),
    "functions wait for each other: f -> f": function(
        "f", call("y", "x", "f"), ret="y:output:0"
    ),
    "functions wait for each other: f -> g -> f": function(
        "f", call("y", "x", "g"), ret="y:output:0"
    )
    + function("g", node("y", "f", "x"), ret="y:r:0"),
    "'batch_dims' is 1048577": const(tensor=VECTOR)
    + const("i", "DT_INT32", VECTOR)
    + const("a", "DT_INT32", SCALAR)
    + node(
        "g",
        "GatherV2",
        "cia",
        batch_dims="i: 1048577",
        Tparams=FLOAT,
        Tindices=INT,
        Taxis=INT,
    ),
}
# Each of these takes the process down when TensorFlow 2.21 imports it.
FATAL = {
    "for more than 254 dimensions": placeholder("x", shape="unknown_rank: true")
    + placeholder("p", "DT_INT32", f"dim {{ size: {2**32} }}")
    + node("y", "Transpose", "xp", T=FLOAT, Tperm=INT),
    "not a vector": placeholder("x", shape="dim { size: 4 }")
    + const("s", "DT_INT32", MATRIX)
    + const("a", "DT_INT32", SCALAR)
    + node("y", "SplitV", "xsa", T=FLOAT, Tlen=INT, num_split="i: 1"),
    "not a scalar": placeholder("q", "DT_RESOURCE")
    + const("n", "DT_INT32", "tensor_shape { dim { size: 3 } }")
    + node("y", "QueueDequeueManyV2", "qn", component_types=f"list {{ {FLOAT} }}"),
    "2 shapes for 1 outputs": node(
        "y",
        "InfeedDequeueTuple",
        dtypes=f"list {{ {FLOAT} }}",
        shapes="list { shape { } shape { } }",
    ),
    "'group_size' is": const()
    + node(
        "y",
        "CollectiveGather",
        "c",
        T=FLOAT,
        group_size=f"i: {2**40}",
        group_key="i: 1",
        instance_key="i: 1",
        shape="shape { }",
    ),
    "at least 1 dimensions": placeholder("t", "DT_RESOURCE")
    + const("f", "DT_INT32", SCALAR)
    + node(
        "y",
        "BoostedTreesPredict",
        "tf",
        num_bucketized_features="i: 1",
        logits_dimension="i: 1",
    ),
    "'tuple_mask' holds no tensor": placeholder("v", "DT_VARIANT")
    + node(
        "y",
        "SplitDedupData",
        "v",
        integer_type=INT,
        float_type=FLOAT,
        tuple_mask='s: "abc"',
    ),
    "only while it runs a graph": const()
    + node(
        "y",
        "_ScopedAllocatorConcat",
        "ccc",
        shape="shape { }",
        T=FLOAT,
        sa_name='s: "a"',
        id="i: 1",
        N="i: 2",
    ),
}


def test_wrong_graphs_are_refused_and_the_reason_is_named():
    wrong = {}
    for message, text in (REFUSED | FATAL).items():
        graph_def = parse(text)
        before = graph_def.SerializeToString(deterministic=True)
        try:
            model.open(graph_def)
        except ModelError as error:
            said = str(error)
            if not said.startswith("the GraphDef: ") or not re.search(message, said):
                wrong[message] = said
        else:
            wrong[message] = "not refused"
        assert graph_def.SerializeToString(deterministic=True) == before, message
    assert wrong == {}


# Besides an end, without which nothing opens.
ACCEPTED = {
    "defaults left out": node("p", "Placeholder", dtype=FLOAT),
    "one value for all": const(tensor="tensor_shape { dim { size: 9 } } float_val: 1"),
    "no values": const(tensor="tensor_shape { dim { size: 9 } }"),
    "no elements": const(tensor="tensor_shape { dim { size: 0 } }"),
    "int4": const(dtype="DT_INT4", tensor="tensor_shape { dim { size: 3 } }"),
    "any device": const().replace('op: "Const"', 'op: "Const" device: "/job:a/x:7"'),
    "output by number": const() + unary("y", ["c:0"]),
    "backwards": unary("y", ["c"]) + const(),
    "name with parts": const(name="a.b/c-d>e"),
    "attributes of other versions": const().replace(
        'op: "Const"', 'op: "Const" attr { key: "from_2031" value { i: 7 } }'
    ),
    "a name in an attribute of the runtime": const().replace(
        "attr", 'attr { key: "_gradient_op_type" value { s: "PyFunc7" } } attr', 1
    ),
    "function as an op": (
        const()
        + function("f", unary("y", ["x"]))
        + node("z", "f", "c")
        + unary("w", ["z"])
    ),
    "function that an If may call again": (
        function(
            "f",
            node("p", "Greater", "xx", T=FLOAT)
            + node(
                "y",
                "If",
                ["p:z:0", "x"],
                Tcond="type: DT_BOOL",
                Tin=f"list {{ {FLOAT} }}",
                Tout=f"list {{ {FLOAT} }}",
                then_branch='func { name: "f" }',
                else_branch='func { name: "f" }',
            ),
            ret="y:output:0",
        )
    ),
    "attribute of the function": function(
        "f", unary("y", ["x"]).replace("type: DT_FLOAT", 'placeholder: "T"')
    ),
    "argument as a result": function("f", "", ret="x"),
}


END = const("end_value") + unary("end", ["end_value"])


def test_unusual_graphs_and_the_test_data_pass():
    for case, text in ACCEPTED.items():
        assert "end" in model.open(parse(text + END)).outputs, case
    for path in TEXTS:
        assert model.open(path).outputs, path.name
    for name, signature in (("one_signature", None), ("two_signatures", "encode")):
        assert model.open(TESTDATA / name, signature=signature).outputs, name


def v1_graph():
    """References, a queue, a table, a cond, a loop, gradients, a py_function."""
    with tf.Graph().as_default() as graph:
        w = tf1.get_variable("w", [2, 2], use_resource=False)
        tf1.assign_add(w, tf.ones([2, 2]))
        queue = tf.queue.FIFOQueue(3, [tf.float32], [[2, 2]])
        queue.enqueue([w * 2.0])
        table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(["a", "b"], [1, 2]), -1
        )
        table.lookup(tf.constant(["a", "c"]))
        with control_flow(1):
            y = tf1.cond(w[0, 0] > 0, lambda: w + 1.0, lambda: w - 1.0)
            _, y = tf1.while_loop(
                lambda i, _: i < 3,
                lambda i, v: (
                    i + 1,
                    tf1.while_loop(lambda v: v[0, 0] < 1.0, lambda v: v * 2.0, [v]),
                ),
                [0, y],
            )
        tf1.gradients(y, w)
        tf1.py_func(lambda x: x, [y], tf.float32)
        tf1.train.Saver()
        tf1.global_variables_initializer()
        tf1.summary.merge([tf1.summary.scalar("s", y[0, 0])])
    return graph.as_graph_def()


def v2_graph():
    @tf.function
    def step(x):
        dataset = tf.data.Dataset.range(3).map(lambda i: i * 2).batch(2)
        total = tf.constant(0, tf.int64)
        for batch in dataset:
            total += tf.reduce_sum(batch)
        parts = tf.map_fn(tf.sin, tf.ragged.constant([[1.0], [2.0, 3.0]]).to_tensor())
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.while_loop(lambda v: v[0] < 9.0, lambda v: [v * 2.0], [x])[0]
        switched = tf.switch_case(tf.cast(total, tf.int32), [lambda: y, lambda: -y])
        return tape.gradient(y, x), switched, parts

    return step.get_concrete_function(tf.TensorSpec([2])).graph.as_graph_def()


@pytest.mark.parametrize("make", [v1_graph, v2_graph, frozen_graph_def])
def test_real_graphs_pass(make):
    graph_def = make()
    assert model.open(graph_def).outputs
    stripped = tf1.GraphDef.FromString(graph_def.SerializeToString())
    tf1.graph_util.remove_training_nodes(stripped)
    assert model.open(stripped).outputs


def chain(count):
    nodes = [const("n0")]
    nodes += [unary(f"n{i}", [f"n{i - 1}"]) for i in range(1, count)]
    return parse("".join(nodes))


def test_a_long_chain_passes_in_any_order():
    graph_def = chain(5_000)
    backwards = tf1.GraphDef(node=list(graph_def.node)[::-1])
    for order in (graph_def, backwards):
        assert [*model.open(order).outputs] == ["n4999"]
    graph_def.node[0].CopyFrom(parse(unary("n0", ["n4999"])).node[0])
    with pytest.raises(ModelError, match=r"wait for each other: .* \.\.\. -> "):
        model.open(graph_def)


def test_a_long_chain_of_calls_passes():
    names = [f"f{i}" for i in range(2_000)]
    text = "".join(
        function(name, call("y", "x", callee), ret="y:output:0")
        for name, callee in itertools.pairwise(names)
    )
    last = function(names[-1], unary("y", ["x"]))
    assert [*model.open(parse(text + last + END)).outputs] == ["end"]
