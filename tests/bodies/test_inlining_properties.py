"""Random nested functions with effects: calls and inlined calls do the same."""

import os

import hypothesis
import tensorflow as tf
from hypothesis import strategies as st

from tests.bodies.calling import calls_left, in_topological_order, same, unordered
from tests.thorough import examples

# More of them, drawn anew: GEUTIL_TEST_EXAMPLES=1000.
EXAMPLES = os.environ.get("GEUTIL_TEST_EXAMPLES")
PROPERTY = examples(int(EXAMPLES or 20), derandomize=EXAMPLES is None)


@st.composite
def steps(draw, args, callees):
    """Draw steps; each appends a tensor to a list that starts with the arguments."""
    result = []
    for count in range(args, args + draw(st.integers(1, 5))):
        value = st.integers(0, count - 1)
        kind = draw(
            st.sampled_from(["constant", "add", "assign", "read", *callees[-2:]])
        )
        if isinstance(kind, int):
            result.append((kind, draw(st.tuples(value, value))))
        else:
            result.append((kind, (draw(value), draw(value))))
    return result


@st.composite
def programs(draw):
    """Draw functions of two arguments, each calling earlier ones, and a main graph."""
    functions = []
    for i in range(draw(st.integers(1, 4))):
        body = draw(steps(2, list(range(i))))
        value = st.integers(0, 1 + len(body))
        functions.append((body, draw(st.lists(value, min_size=1, max_size=3))))
    main = draw(steps(1, list(range(len(functions)))))
    main.append((len(functions) - 1, (0, len(main))))
    return (
        functions,
        main,
        [draw(st.sampled_from(["data", "both", "control"])) for _ in main],
    )


def apply(kind, inputs, variable, functions):
    x, y = inputs
    if kind == "constant":
        return tf.constant(3)
    if kind == "add":
        return x + 2 * y
    if kind == "assign":
        variable.assign(variable.read_value() * 3 + x)
        return y + 1
    if kind == "read":
        # Doubled: a Session of TensorFlow 2.21 lets an assignment in a nested function
        # change a value that was read before and handed to it as an argument.
        return variable.read_value() * 2
    return functions[kind](x, y)[-1]


def function_of(body, results, variable, functions):
    def call(x, y):
        tensors = [x, y]
        for kind, inputs in body:
            tensors.append(
                apply(kind, [tensors[i] for i in inputs], variable, functions)
            )
        return [tensors[i] for i in results]

    return tf.function(call, autograph=False)


def after(last, kind, inputs, order, variable, functions):
    """Make a step of the main graph that comes after `last` was computed."""
    x, y = inputs
    if order == "data" and isinstance(kind, int):
        return apply(kind, [x + last, y], variable, functions)
    with tf.control_dependencies([last.op]):
        if order == "both":
            x, y = tf.identity(x), tf.identity(y)
        if kind != "assign":
            return apply(kind, [x, y], variable, functions)
        value = variable.read_value() * 3 + x
        change = variable.assign(value, read_value=False)
    with tf.control_dependencies([change]):
        return y + 1


def build(functions, main, orders):
    """Build the main graph; each of its steps comes after the one before."""
    with tf.Graph().as_default() as graph:
        variable = tf.Variable(1, name="v")
        made = []
        for body, results in functions:
            made.append(function_of(body, results, variable, made))
        tensors = [tf.compat.v1.placeholder(tf.int32, [], name="x")]
        for (kind, inputs), order in zip(main, orders, strict=True):
            chosen = [tensors[i] for i in inputs]
            tensors.append(after(tensors[-1], kind, chosen, order, variable, made))
        names = [
            tf.identity(t, name=f"step{i}").name for i, t in enumerate(tensors[1:])
        ]
        tf.group(variable.initializer, name="init")
        tf.identity(variable.read_value(), name="value")
    return graph.as_graph_def(), names


@PROPERTY
@hypothesis.given(programs())
def test_random_functions(program):
    graph_def, names = build(*program)
    each = [[step] for name in names for step in ("init", name, "value:0")]
    inlined = same(graph_def, [*each, ["init"], names, ["value:0"]], {"x:0": 5})
    assert calls_left(inlined.graph_def) == []
    assert not inlined.graph_def.library.function
    assert in_topological_order(inlined.graph_def)
    assert unordered(inlined.graph_def) == []
