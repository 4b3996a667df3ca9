"""Function bodies as plain nodes, and the order of functions by their calls."""

import random
import re
from collections import Counter

import hypothesis
import networkx as nx
import pytest
import tensorflow as tf
from google.protobuf import text_format
from google.protobuf.message import DecodeError
from hypothesis import strategies as st
from tensorflow.core.framework import function_pb2
from tensorflow.python.framework import function_def_to_graph

from geutil.errors import GeutilError, TransformError
from geutil.graph import protos
from geutil.graph.protos import flat_body, needs_first, on_cycles
from tests.model.mutations import mutate

VECTOR = tf.TensorSpec([4], tf.float32)


def several_outputs(x):
    first, second = tf.split(x, 2)
    values, places = tf.unique(tf.concat([second, first], 0))
    return tf.identity_n([values, x]), places


def passes_through(x, y):
    return y, x, y


def control_inputs(x):
    with tf.control_dependencies([tf.debugging.assert_positive(x), x]):
        return tf.negative(x)


def calls_another(x):
    return nested(x, x) + nested(x, x)


@tf.function(autograph=False)
def nested(x, y):
    return tf.raw_ops.TopKV2(input=x, k=2)[0] + y[:2]


def loops(x):
    return tf.while_loop(
        lambda i, _: i < 3, lambda i, v: (i + 1, nested(x, v)[0] + v), [0, x]
    )


class Owner:
    variable = None


def reads_a_variable(x):
    if Owner.variable is None:
        Owner.variable = tf.Variable([1.0, 2.0, 3.0, 4.0])
    Owner.variable.assign_add(x)
    return Owner.variable * x


def nothing():
    tf.print("nothing")


FUNCTIONS = {
    several_outputs: 1,
    passes_through: 2,
    control_inputs: 1,
    calls_another: 1,
    loops: 1,
    reads_a_variable: 1,
    nothing: 0,
}


@pytest.fixture(scope="module", params=FUNCTIONS, ids=lambda f: f.__name__)
def concrete(request):
    specs = [VECTOR] * FUNCTIONS[request.param]
    return tf.function(request.param, autograph=False).get_concrete_function(*specs)


def canonical(name):
    return name.removesuffix(":0")


def library_of(concrete):
    functions = concrete.graph.as_graph_def().library.function
    return {f.signature.name: f for f in functions}


def test_nodes_are_those_of_tensorflow(concrete):
    definition = concrete.function_def
    before = definition.SerializeToString(deterministic=True)
    with concrete.graph.as_default():
        expected, names = function_def_to_graph.function_def_to_graph_def(definition)
    for node in expected.node:
        inputs = [canonical(name) for name in node.input]
        del node.input[:]
        node.input.extend(inputs)
    body = flat_body(definition, library_of(concrete))
    count = len(body.args)
    assert body.name == definition.signature.name
    assert body.node_defs() == list(expected.node[count:])
    placeholders = expected.node[:count]
    assert [a.name for a in body.args] == [p.name for p in placeholders]
    assert [a.dtype for a in body.args] == [p.attr["dtype"].type for p in placeholders]
    outputs = definition.signature.output_arg
    assert [r.name for r in body.results] == [o.name for o in outputs]
    assert [r.dtype for r in body.results] == [o.type for o in outputs]
    assert [r.tensor for r in body.results] == [
        canonical(names[definition.ret[o.name]]) for o in outputs
    ]
    assert body.control_results == tuple(
        (name, definition.control_ret[name])
        for name in definition.signature.control_output
    )
    # The definition is not changed, nor shared.
    for node in body.node_defs():
        node.name = "changed"
    assert definition.SerializeToString(deterministic=True) == before


def test_arguments_keep_their_attributes():
    concrete = tf.function(reads_a_variable, autograph=False).get_concrete_function(
        VECTOR
    )
    definition = function_pb2.FunctionDef()
    definition.CopyFrom(concrete.function_def)
    data = definition.signature.input_arg[1].handle_data.add(
        dtype=tf.float32.as_datatype_enum
    )
    data.shape.dim.add(size=4)
    definition.arg_attr[1].attr["_handle_dtypes"].list.type.append(data.dtype)
    x, handle = flat_body(definition, library_of(concrete)).args
    assert x.attributes["_output_shapes"].list.shape[0].dim[0].size == 4
    assert x.attributes["_user_specified_name"].s == b"x"
    assert x.handle_data == ()
    assert handle.dtype == tf.resource.as_datatype_enum
    assert handle.handle_data == (data,)
    assert list(handle.attributes["_handle_dtypes"].list.type) == [data.dtype]


POLYMORPHIC = """
signature {
  name: "Poly"
  input_arg { name: "x" type_attr: "T" }
  output_arg { name: "y" type_attr: "T" }
  attr { name: "T" type: "type" }
  attr { name: "F" type: "func" default_value { func { name: "G" } } }
}
node_def {
  name: "a" op: "IdentityN" input: "x" input: "x"
  attr { key: "T" value { list { type: DT_INT32 type: DT_FLOAT } } }
}
node_def {
  name: "b" op: "Neg" input: "a:output:1"
  attr { key: "T" value { placeholder: "T" } }
}
node_def {
  name: "c" op: "PartitionedCall" input: "b:y:0"
  attr { key: "f" value { placeholder: "F" } }
  attr { key: "g" value { list { func {
    name: "H" attr { key: "S" value { placeholder: "T" } }
  } } } }
  attr { key: "Tout" value { list { type: DT_FLOAT } } }
}
ret { key: "y" value: "c:output:0" }
"""


def polymorphic(changes=()):
    text = POLYMORPHIC
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return text_format.Parse(text, function_pb2.FunctionDef())


FLOAT = {"T": tf.compat.v1.AttrValue(type=tf.float32.as_datatype_enum)}


def test_attributes_are_filled_in():
    body = flat_body(polymorphic(), {}, FLOAT)
    a, b, c = body.node_defs()
    assert list(b.input) == ["a:1"]
    assert b.attr["T"].type == tf.float32.as_datatype_enum
    assert c.attr["f"].func.name == "G"
    assert c.attr["g"].list.func[0].attr["S"].type == tf.float32.as_datatype_enum
    assert body.args[0].dtype == body.results[0].dtype == tf.float32.as_datatype_enum


def test_a_function_says_how_many_outputs_it_has():
    called = text_format.Parse(
        """signature {
            name: "Many"
            output_arg { name: "first" number_attr: "N" type: DT_FLOAT }
            output_arg { name: "second" type: DT_FLOAT }
            attr { name: "N" type: "int" default_value { i: 3 } }
        }""",
        function_pb2.FunctionDef(),
    )
    caller = text_format.Parse(
        """signature { name: "Caller" output_arg { name: "y" type: DT_FLOAT } }
        node_def { name: "many" op: "Many" }
        ret { key: "y" value: "many:second:0" }""",
        function_pb2.FunctionDef(),
    )
    assert flat_body(caller, {"Many": called}).results[0].tensor == "many:3"


DAMAGED = {
    "missing node": ([('input: "b:y:0"', 'input: "z:y:0"')], "reads 'z:y:0'"),
    "missing output": ([('"b:y:0"', '"b:z:0"')], "reads 'b:z:0'"),
    "index too high": ([('"a:output:1"', '"a:output:2"')], "reads 'a:output:2'"),
    "no index": ([('"a:output:1"', '"a:output:x"')], "reads 'a:output:x'"),
    "huge index": ([('"a:output:1"', f'"a:output:{"9" * 5000}"')], "reads 'a:output"),
    "too many parts": ([('"b:y:0"', '"b:y:0:0"')], "reads 'b:y:0:0'"),
    "missing control input": ([('input: "b:y:0"', 'input: "^z"')], r"reads '\^z'"),
    "index of an argument": ([('"x" input', '"x:1" input')], "reads 'x:1'"),
    "names twice": ([('name: "b" op', 'name: "a" op')], "have the same name"),
    "node like an argument": ([('name: "b" op', 'name: "x" op')], "the same name"),
    "unknown op": ([('op: "Neg"', 'op: "Nope"')], "op 'Nope' of node 'b'"),
    "no result": ([('key: "y"', 'key: "z"')], "what its result 'y' is"),
    "no number of outputs": ([('key: "Tout"', 'key: "no"')], "no attribute 'Tout'"),
    "no value": ([('placeholder: "F"', 'placeholder: "Q"')], "'Q' of function 'Poly'"),
    "no type": ([('"x" type_attr: "T"', '"x" type_attr: "Q"')], "the type of 'x'"),
    "a list": ([('"x" type_attr: "T"', '"x" type_list_attr: "T"')], "'x' .* is a list"),
}


def test_damaged_definitions_are_refused():
    wrong = {}
    for name, (changes, message) in DAMAGED.items():
        try:
            flat_body(polymorphic(changes), {}, FLOAT)
        except TransformError as error:
            if not re.search(message, str(error)):
                wrong[name] = str(error)
        else:
            wrong[name] = "not refused"
    assert wrong == {}
    with pytest.raises(TransformError, match=r"'T' of function 'Poly' has no value"):
        flat_body(polymorphic(), {})


def test_damaged_bytes_are_read_or_refused(concrete):
    data = concrete.function_def.SerializeToString()
    randomly = random.Random(7)
    counts = Counter()
    for _ in range(300):
        try:
            damaged = function_pb2.FunctionDef.FromString(mutate(data, randomly)[1])
        except DecodeError:
            continue
        try:
            flat_body(damaged, {})
            counts["read"] += 1
        except GeutilError:
            counts["refused"] += 1
    assert min(counts["read"], counts["refused"]) > 10


def test_control_results_that_the_signature_leaves_out():
    definition = polymorphic()
    definition.control_ret["two"] = "b"
    definition.control_ret["one"] = "a"
    body = flat_body(definition, {}, FLOAT)
    assert body.control_results == (("one", "a"), ("two", "b"))
    definition.control_ret["two"] = "z"
    with pytest.raises(TransformError, match=r"reads '\^z'"):
        flat_body(definition, {}, FLOAT)


PROPERTY = hypothesis.settings(max_examples=100, deadline=None, derandomize=True)


@st.composite
def needs(draw):
    count = draw(st.integers(1, 12))
    some = st.lists(st.integers(0, count), max_size=4)  # One value is no key.
    return {key: draw(some) for key in draw(st.permutations(range(count)))}


def graph_of(needs):
    graph = nx.DiGraph()
    graph.add_nodes_from(needs)
    graph.add_edges_from((v, k) for k, vs in needs.items() for v in vs if v in needs)
    return graph


@PROPERTY
@hypothesis.given(needs())
def test_order_and_cycles(needs):
    graph = graph_of(needs)
    order = needs_first(needs)
    assert sorted(order) == sorted(needs)
    components = list(nx.strongly_connected_components(graph))
    cyclic = {k for c in components if len(c) > 1 for k in c}
    assert on_cycles(needs) == cyclic | {k for k, _ in nx.selfloop_edges(graph)}
    # Edges from one component into another are all kept.
    component = {k: i for i, c in enumerate(components) for k in c}
    place = {key: i for i, key in enumerate(order)}
    for before, after in graph.edges:
        if component[before] != component[after]:
            assert place[before] < place[after]


def test_an_order_that_is_right_is_kept():
    needs = {i: [j for j in (i - 1, i - 3) if j >= 0] for i in range(50)}
    assert needs_first(needs) == list(needs)


def test_long_chains():
    length = 100_000
    assert needs_first({i: [i + 1] for i in range(length)})[0] == length - 1
    ring = {i: [(i + 1) % length] for i in range(length)}
    assert len(on_cycles(ring)) == length


def test_functions_of_attributes_and_their_new_names():
    node = tf.compat.v1.NodeDef()
    node.attr["f"].func.name = "one"
    node.attr["none"].func.name = ""
    node.attr["text"].s = b"no_function"
    for name in ("two", "", "two", "three"):
        node.attr["list"].list.func.add(name=name)
    found = protos.functions_of_attributes(node.attr)
    assert sorted(found) == ["one", "three", "two", "two"]
    protos.rename_functions(node, {"one": "1", "two": "2"})
    found = protos.functions_of_attributes(node.attr)
    assert sorted(found) == ["1", "2", "2", "three"]


def test_functions_that_attributes_of_functions_name():
    node = tf.compat.v1.NodeDef(op="f")
    node.attr["one"].func.name = "outer"
    node.attr["one"].func.attr["in"].list.func.add(name="inner")
    found = protos.names_of_functions(node)
    assert list(found) == ["f", "outer", "inner"]
    protos.rename_called(node, {"f": "g", "inner": "new"})
    assert list(protos.names_of_functions(node)) == ["g", "outer", "new"]
