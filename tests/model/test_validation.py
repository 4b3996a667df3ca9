import itertools
from pathlib import Path

import pytest
import tensorflow as tf
from google.protobuf import text_format

from geutil.errors import ModelError
from geutil.model.files.reading import read_graph_def, read_saved_model
from geutil.model.files.validation import check_graph_def
from tests.model.samples import frozen_graph_def

tf1 = tf.compat.v1
TESTDATA = Path(__file__).parents[2] / "testdata"
TEXTS = [p for p in sorted(TESTDATA.glob("*.pbtxt")) if ".meta." not in p.name]


def parse(text):
    # Merge allows several libraries, Parse does not.
    return text_format.Merge(text, tf1.GraphDef())


def const(name="c", dtype="DT_FLOAT", tensor="float_val: 1.0", value_dtype=None):
    return f"""
    node {{ name: "{name}" op: "Const"
      attr {{ key: "dtype" value {{ type: {dtype} }} }}
      attr {{ key: "value" value {{ tensor {{ dtype: {value_dtype or dtype} {tensor} }} }} }}
    }}"""  # noqa: E501


def unary(name, of, op="Neg", dtype="DT_FLOAT"):
    inputs = " ".join(f'input: "{name}"' for name in of)
    return f"""
    node {{ name: "{name}" op: "{op}" {inputs}
      attr {{ key: "T" value {{ type: {dtype} }} }} }}"""


def function(name, nodes, ret="y:y:0", arg="x", more=""):
    return f"""
    library {{ function {{
      signature {{ name: "{name}"
        input_arg {{ name: "{arg}" type: DT_FLOAT }}
        output_arg {{ name: "r" type: DT_FLOAT }} }}
      {nodes.replace("node {", "node_def {")}
      ret {{ key: "r" value: "{ret}" }} {more} }} }}"""


def call(name, of, callee, op="PartitionedCall"):
    return f"""
    node {{ name: "{name}" op: "{op}" input: "{of}"
      attr {{ key: "Tin" value {{ list {{ type: DT_FLOAT }} }} }}
      attr {{ key: "Tout" value {{ list {{ type: DT_FLOAT }} }} }}
      attr {{ key: "f" value {{ func {{ name: "{callee}" }} }} }} }}"""


def attribute(name, value):
    return f'attr {{ key: "{name}" value {{ {value} }} }}'


REFUSED = {
    "no name": (const(name=""), "no legal name"),
    "illegal name": (const(name="a b"), "'a b', which is no legal name"),
    "names twice": (const() + const(), "two nodes are called 'c'"),
    "unknown op": (
        'node { name: "x" op: "Nonsense" }',
        r"node 'x' \(Nonsense\).*tf\.load_op_library",
    ),
    "unknown input": (unary("y", ["z"]), r"'y' \(Neg\): its input 'z' does not exist"),
    "unknown control input": (const() + unary("y", ["c", "^z"]), "waits for 'z'"),
    "data after control": (const() + unary("y", ["^c", "c"]), "comes after a control"),
    "no such output": (const() + unary("y", ["c:1"]), "'c:1' does not exist: .* 1 out"),
    "too few inputs": (unary("y", []), "takes 1 inputs, but has 0"),
    "too many inputs": (const() + unary("y", ["c", "c"]), "takes 1 inputs, but has 2"),
    "wrong type": (
        const(dtype="DT_INT32", tensor="int_val: 1") + unary("y", ["c"]),
        "its input 'c' is of type int32; taken is float32",
    ),
    "missing attribute": ('node { name: "c" op: "Const" }', "'value' is missing"),
    "wrong kind of attribute": (
        'node { name: "p" op: "Placeholder" ' + attribute("dtype", "i: 1") + "}",
        "'dtype' is of type i; declared: type",
    ),
    "attribute without a value": (
        'node { name: "p" op: "Placeholder" ' + attribute("dtype", "") + "}",
        "'dtype' is of type none at all",
    ),
    "wrong kind in a list": (
        'node { name: "n" op: "IdentityN" ' + attribute("T", "list { i: 1 }") + "}",
        "'T' lists values of type i",
    ),
    "type that is not allowed": (
        const(dtype="DT_STRING", tensor='string_val: "a"')
        + unary("y", ["c"], dtype="DT_STRING"),
        "'T' is string; accepted: .*float32",
    ),
    "value below the minimum": (
        const()
        + 'node { name: "m" op: "AddN" input: "c" '
        + attribute("N", "i: 0")
        + attribute("T", "type: DT_FLOAT")
        + "}",
        "'N' is or has 0; at least 1",
    ),
    "unknown data type": (
        'node { name: "p" op: "Placeholder" ' + attribute("dtype", "type: 77") + "}",
        "data type 77",
    ),
    "attribute of a function outside one": (
        'node { name: "p" op: "Placeholder" '
        + attribute("dtype", 'placeholder: "T"')
        + "}",
        "'dtype' is of type placeholder",
    ),
    "negative size": (
        'node { name: "p" op: "Placeholder" '
        + attribute("dtype", "type: DT_FLOAT")
        + attribute("shape", "shape { dim { size: -2 } }")
        + "}",
        "negative size",
    ),
    "absurd number of outputs": (
        const()
        + 'node { name: "s" op: "Unpack" input: "c" '
        + attribute("num", f"i: {2**31}")
        + attribute("T", "type: DT_FLOAT")
        + "}",
        f"'num' asks for {2**31} tensors",
    ),
    "absurd constant": (
        const(tensor=f"tensor_shape {{ dim {{ size: {2**40} }} }} float_val: 1"),
        "a constant of .* bytes",
    ),
    "overflowing constant": (
        const(tensor=f"tensor_shape {{ {f'dim {{ size: {2**40} }}' * 2} }}"),
        "too many elements",
    ),
    "constant of unknown shape": (
        const(tensor="tensor_shape { unknown_rank: true }"),
        "unknown shape",
    ),
    "constant with a free size": (
        const(tensor="tensor_shape { dim { size: -1 } }"),
        "negative size",
    ),
    "payload too short": (
        const(tensor=r'tensor_shape { dim { size: 2 } } tensor_content: "\000\000"'),
        "holds 2 bytes, .* asks for 8",
    ),
    "too many values": (const(tensor="float_val: 1 float_val: 2"), "holds 2 values"),
    "constant of another type": (
        const(tensor="int_val: 1", value_dtype="DT_INT32"),
        "its value is int32, but its type is float32",
    ),
    "unknown function": (const() + call("y", "c", "nobody"), "function 'nobody'"),
    "cycle": (
        unary("a", ["b"]) + unary("b", ["a"]),
        "nodes wait for each other: (a -> b -> a|b -> a -> b)",
    ),
    "cycle of control": (const() + unary("a", ["c", "^a"]), "wait for each other: a"),
    "functions twice": (
        function("f", unary("y", ["x"])) + function("f", unary("y", ["x"])),
        "two functions are called 'f'",
    ),
    "unknown input in a body": (
        function("f", unary("y", ["z:y:0"])),
        r"function 'f': node 'y' \(Neg\): its input 'z:y:0' does not exist",
    ),
    "input of a body without its output": (
        function("f", unary("z", ["x"]) + unary("y", ["z"])),
        "its input 'z' does not exist",
    ),
    "no such output in a body": (
        function("f", unary("z", ["x"]) + unary("y", ["z:q:0"])),
        r"has the outputs \['y'\]",
    ),
    "result that is not computed": (
        function("f", unary("y", ["x"])).replace('key: "r"', 'key: "s"'),
        "its result 'r' is not computed",
    ),
    "result that does not exist": (
        function("f", unary("y", ["x"]), ret="q:y:0"),
        "its result 'r': its input 'q:y:0' does not exist",
    ),
    "control result that does not exist": (
        function("f", unary("y", ["x"]), more='control_ret { key: "a" value: "b" }'),
        "waits for 'b'",
    ),
    "cycle in a body": (
        function("f", unary("y", ["z:y:0"]) + unary("z", ["y:y:0"])),
        "function 'f': nodes wait for each other",
    ),
    "function that calls itself": (
        function("f", call("y", "x", "f"), ret="y:output:0"),
        "functions wait for each other: f -> f",
    ),
    "functions that call each other": (
        function("f", call("y", "x", "g"), ret="y:output:0")
        + function("g", 'node { name: "y" op: "f" input: "x" }', ret="y:r:0"),
        "functions wait for each other: f -> g -> f",
    ),
    "batch dimensions beyond the rank": (
        const(dtype="DT_FLOAT", tensor="tensor_shape { dim { size: 1 } }")
        + const("i", "DT_INT32", "tensor_shape { dim { size: 1 } }")
        + const("a", "DT_INT32", "int_val: 0")
        + 'node { name: "g" op: "GatherV2" input: "c" input: "i" input: "a" '
        + attribute("batch_dims", "i: 1048577")
        + attribute("Tparams", "type: DT_FLOAT")
        + attribute("Tindices", "type: DT_INT32")
        + attribute("Taxis", "type: DT_INT32")
        + "}",
        "'batch_dims' is 1048577",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_refused_and_named(case):
    text, message = REFUSED[case]
    graph_def = parse(text)
    before = graph_def.SerializeToString(deterministic=True)
    with pytest.raises(ModelError, match=message) as caught:
        check_graph_def(graph_def, "the file")
    assert str(caught.value).startswith("the file: ")
    assert graph_def.SerializeToString(deterministic=True) == before


PLACEHOLDER = """
    node {{ name: "{name}" op: "Placeholder"
      attr {{ key: "dtype" value {{ type: {dtype} }} }}
      attr {{ key: "shape" value {{ shape {{ {dims} }} }} }} }}"""


def placeholder(name, dtype, *sizes):
    dims = " ".join(f"dim {{ size: {size} }}" for size in sizes)
    return PLACEHOLDER.format(name=name, dtype=dtype, dims=dims)


# Each of these takes the process down when TensorFlow 2.21 imports it.
FATAL = {
    "transposed by the many": (
        placeholder("x", "DT_FLOAT").replace(
            "shape { }", "shape { unknown_rank: true }"
        )
        + placeholder("p", "DT_INT32", 2**32)
        + 'node { name: "y" op: "Transpose" input: "x" input: "p" '
        + attribute("T", "type: DT_FLOAT")
        + attribute("Tperm", "type: DT_INT32")
        + "}",
        "for more than 254 dimensions",
    ),
    "split by a matrix": (
        placeholder("x", "DT_FLOAT", 4)
        + const("s", "DT_INT32", "tensor_shape { dim { size: 1 } dim { size: 1 } }")
        + const("a", "DT_INT32", "int_val: 0")
        + 'node { name: "y" op: "SplitV" input: "x" input: "s" input: "a" '
        + attribute("T", "type: DT_FLOAT")
        + attribute("Tlen", "type: DT_INT32")
        + attribute("num_split", "i: 1")
        + "}",
        "not a vector",
    ),
    "dequeued by a vector": (
        placeholder("q", "DT_RESOURCE")
        + const("n", "DT_INT32", "tensor_shape { dim { size: 3 } }")
        + 'node { name: "y" op: "QueueDequeueManyV2" input: "q" input: "n" '
        + attribute("component_types", "list { type: DT_FLOAT }")
        + "}",
        "not a scalar",
    ),
    "more shapes than outputs": (
        'node { name: "y" op: "InfeedDequeueTuple" '
        + attribute("dtypes", "list { type: DT_FLOAT }")
        + attribute("shapes", "list { shape { } shape { } }")
        + "}",
        "2 shapes for 1 outputs",
    ),
    "a group beyond 32 bits": (
        const()
        + 'node { name: "y" op: "CollectiveGather" input: "c" '
        + attribute("T", "type: DT_FLOAT")
        + attribute("group_size", f"i: {2**40}")
        + attribute("group_key", "i: 1")
        + attribute("instance_key", "i: 1")
        + attribute("shape", "shape { }")
        + "}",
        "'group_size' is",
    ),
    "features without a dimension": (
        placeholder("t", "DT_RESOURCE")
        + const("f", "DT_INT32", "int_val: 1")
        + 'node { name: "y" op: "BoostedTreesPredict" input: "t" input: "f" '
        + attribute("num_bucketized_features", "i: 1")
        + attribute("logits_dimension", "i: 1")
        + "}",
        "at least 1 dimensions",
    ),
    "a mask that is none": (
        placeholder("v", "DT_VARIANT")
        + 'node { name: "y" op: "SplitDedupData" input: "v" '
        + attribute("integer_type", "type: DT_INT32")
        + attribute("float_type", "type: DT_FLOAT")
        + attribute("tuple_mask", 's: "abc"')
        + "}",
        "'tuple_mask' holds no tensor",
    ),
    "an op of the optimizers": (
        const()
        + 'node { name: "y" op: "_ScopedAllocatorConcat" '
        + 'input: "c" input: "c" input: "c" '
        + attribute("shape", "shape { }")
        + attribute("T", "type: DT_FLOAT")
        + attribute("sa_name", 's: "a"')
        + attribute("id", "i: 1")
        + attribute("N", "i: 2")
        + "}",
        "only while it runs a graph",
    ),
}


@pytest.mark.parametrize("case", FATAL)
def test_what_would_take_the_process_down_is_refused(case):
    text, message = FATAL[case]
    with pytest.raises(ModelError, match=message):
        check_graph_def(parse(text), "the file")


ACCEPTED = {
    "nothing": "",
    "defaults left out": (
        'node { name: "p" op: "Placeholder" '
        + attribute("dtype", "type: DT_FLOAT")
        + "}"
    ),
    "one value for all": const(tensor="tensor_shape { dim { size: 9 } } float_val: 1"),
    "no values": const(tensor="tensor_shape { dim { size: 9 } }"),
    "no elements": const(tensor="tensor_shape { dim { size: 0 } }"),
    "int4": const(dtype="DT_INT4", tensor="tensor_shape { dim { size: 3 } }"),
    "any device": const().replace('op: "Const"', 'op: "Const" device: "/job:a/x:7"'),
    "output by number": const() + unary("y", ["c:0"]),
    "backwards": unary("y", ["c"]) + const(),
    "name with parts": const(name="a.b/c-d>e"),
    "attributes of other versions": const().replace(
        'op: "Const"', 'op: "Const" ' + attribute("from_2031", "i: 7")
    ),
    "a name in an attribute of the runtime": const().replace(
        'op: "Const"', 'op: "Const" ' + attribute("_gradient_op_type", 's: "PyFunc7"')
    ),
    "function as an op": (
        const()
        + function("f", unary("y", ["x"]))
        + 'node { name: "z" op: "f" input: "c" }'
        + unary("w", ["z"])
    ),
    "function that an If may call again": (
        function(
            "f",
            'node { name: "p" op: "Greater" input: "x" input: "x" '
            + attribute("T", "type: DT_FLOAT")
            + "}"
            + 'node { name: "y" op: "If" input: "p:z:0" input: "x" '
            + attribute("Tcond", "type: DT_BOOL")
            + attribute("Tin", "list { type: DT_FLOAT }")
            + attribute("Tout", "list { type: DT_FLOAT }")
            + attribute("then_branch", 'func { name: "f" }')
            + attribute("else_branch", 'func { name: "f" }')
            + "}",
            ret="y:output:0",
        )
    ),
    "attribute of the function": function(
        "f", unary("y", ["x"]).replace("type: DT_FLOAT", 'placeholder: "T"')
    ),
    "argument as a result": function("f", "", ret="x"),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_is_unusual_passes(case):
    check_graph_def(parse(ACCEPTED[case]), case)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_the_test_data_passes(path):
    check_graph_def(read_graph_def(path), path.name)


@pytest.mark.parametrize("name", ["one_signature", "two_signatures"])
def test_the_saved_models_pass(name):
    (meta_graph,) = read_saved_model(TESTDATA / name).meta_graphs
    check_graph_def(meta_graph.graph_def, name)


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
        tf1.disable_control_flow_v2()
        try:
            y = tf1.cond(w[0, 0] > 0, lambda: w + 1.0, lambda: w - 1.0)
            _, y = tf1.while_loop(
                lambda i, _: i < 3,
                lambda i, v: (
                    i + 1,
                    tf1.while_loop(lambda v: v[0, 0] < 1.0, lambda v: v * 2.0, [v]),
                ),
                [0, y],
            )
        finally:
            tf1.enable_control_flow_v2()
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
    check_graph_def(graph_def, make.__name__)
    stripped = tf1.GraphDef.FromString(graph_def.SerializeToString())
    tf1.graph_util.remove_training_nodes(stripped)
    check_graph_def(stripped, make.__name__)


def test_a_keras_model_of_every_kind_of_layer_passes():
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            layers.Input((8, 6)),
            layers.Conv1D(4, 3),
            layers.BatchNormalization(),
            layers.Bidirectional(layers.LSTM(3, return_sequences=True)),
            layers.GRU(3, return_sequences=True, unroll=True),
            layers.Dropout(0.5),
            layers.Dense(2, activation="softmax"),
        ]
    )
    traced = tf.function(lambda x: model(x, training=True)).get_concrete_function(
        tf.TensorSpec([None, 8, 6])
    )
    check_graph_def(traced.graph.as_graph_def(), "keras")


def chain(count):
    nodes = [const("n0")]
    nodes += [unary(f"n{i}", [f"n{i - 1}"]) for i in range(1, count)]
    return parse("".join(nodes))


def test_a_long_chain_passes_in_any_order():
    graph_def = chain(5_000)
    check_graph_def(graph_def, "chain")
    nodes = list(graph_def.node)[::-1]
    check_graph_def(tf1.GraphDef(node=nodes), "backwards")
    graph_def.node[0].CopyFrom(parse(unary("n0", ["n4999"])).node[0])
    with pytest.raises(ModelError, match=r"wait for each other: .* \.\.\. -> "):
        check_graph_def(graph_def, "circle")


def test_a_long_chain_of_calls_passes():
    names = [f"f{i}" for i in range(2_000)]
    text = "".join(
        function(name, call("y", "x", callee), ret="y:output:0")
        for name, callee in itertools.pairwise(names)
    )
    last = function(names[-1], unary("y", ["x"]))
    check_graph_def(parse(text + last), "calls")
