"""Norms in the bodies of loops, of conditionals and of functions that are called."""

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil import model
from geutil.batchnorm import FoldReport, fold_batch_norms
from geutil.errors import FinalizedGraphError, FoldError, StaleGraphError
from tests.settings import default_graph, evaluate, needs_eager

pytestmark = needs_eager

X = np.random.default_rng(0).normal(size=(2, 5)).astype(np.float32)
SPEC = tf.TensorSpec([None, 5], name="x")
CONSTANTS = {
    "kernel": np.random.default_rng(1).normal(size=(5, 5)).astype(np.float32) / 3,
    "mean": np.float32([0.5, -1, 0.2, 0.1, 0.3]),
    "variance": np.float32([0.5, 1, 2, 3, 0.7]),
    "beta": np.float32([1, 2, -1, 0.3, 0]),
    "gamma": np.float32([2, 0.5, -1, 1, 0.7]),
}


def parameters():
    """Return constants of the norm in the default graph."""
    return [tf.constant(CONSTANTS[k]) for k in ("mean", "variance", "beta", "gamma")]


class Layer:
    """A dense layer and its norm, of constants in the body or of variables."""

    def __init__(self, variables):
        self.values = dict(CONSTANTS)
        if variables:
            self.values = {k: tf.Variable(v, name=k) for k, v in CONSTANTS.items()}

    def __call__(self, x):
        v = {k: tf.convert_to_tensor(value) for k, value in self.values.items()}
        y = tf.matmul(x, v["kernel"], name="dense")
        return tf.nn.batch_normalization(
            y, v["mean"], v["variance"], v["beta"], v["gamma"], 1e-3, "norm"
        )


def reference(x):
    """Compute the layer in numpy, in float64."""
    v = {k: value.astype(np.float64) for k, value in CONSTANTS.items()}
    y = (x @ v["kernel"] - v["mean"]) / np.sqrt(v["variance"] + 1e-3)
    return y * v["gamma"] + v["beta"]


def loop(layer, x):
    _, y = tf.while_loop(
        lambda i, y: i < 3,
        lambda i, y: (i + 1, tf.tanh(layer(y))),
        [0, x],
        shape_invariants=[tf.TensorShape([]), tf.TensorShape([None, 5])],
    )
    return y


def branch(layer, x):
    then = lambda: tf.tanh(layer(x))  # noqa: E731
    return tf.cond(tf.reduce_sum(x) > -1e6, then, lambda: x)


def call(layer, x):
    return tf.function(lambda x: tf.tanh(layer(x)), autograph=False)(x)


def returned(layer, x):
    # The norm is the result of the body itself.
    return tf.tanh(tf.function(layer.__call__, autograph=False)(x))


def nested(layer, x):
    inner = tf.function(lambda x: tf.tanh(layer(x)), autograph=False)
    _, y = tf.while_loop(
        lambda i, y: i < 2,
        lambda i, y: (i + 1, tf.cond(i < 5, lambda: inner(y), lambda: y)),
        [0, inner(x)],
        shape_invariants=[tf.TensorShape([]), tf.TensorShape([None, 5])],
    )
    return y


def repeated(times):
    y = X.astype(np.float64)
    for _ in range(times):
        y = np.tanh(reference(y))
    return y


# How often the layer is computed in each.
TIMES = {loop: 3, branch: 1, call: 1, returned: 1, nested: 3}
VARIABLES = pytest.mark.parametrize("variables", [False, True])


def traced(layer, fold=None, builds=tuple(TIMES)):
    """Return a tf.function of bodies, folded while it is traced if asked."""

    @tf.function(input_signature=[SPEC], autograph=False)
    def function(x):
        results = {build.__name__: build(layer, x) for build in builds}
        if fold is not None:
            fold.append(fold_batch_norms(default_graph(), strict=True))
        return results

    return function


def in_graph(graph_def):
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(graph_def, name="")
    return graph


def saved_graph(opened, folder):
    path = opened.save(folder / "model.pb", "graph_def", overwrite=True)
    return tf.compat.v1.GraphDef.FromString(path.read_bytes())


def imported(function):
    """Return the graph of a function as an import makes it, and its results by name."""
    concrete = function.get_concrete_function()
    graph = in_graph(concrete.graph.as_graph_def())
    outputs = concrete.structured_outputs
    return graph, {n: graph.get_tensor_by_name(t.name) for n, t in outputs.items()}


def check(values):
    """Check the value of each body against numpy; name those that are wrong."""
    expected = {build.__name__: repeated(times) for build, times in TIMES.items()}
    wrong = {
        name: np.abs(value - expected[name]).max()
        for name, value in values.items()
        if not np.allclose(value, expected[name], rtol=1e-5, atol=1e-6)
    }
    assert wrong == {}


def roots(graph_def):
    """Count the roots that a frozen graph takes, in its functions too."""
    bodies = [f.node_def for f in graph_def.library.function]
    return sum(n.op == "Rsqrt" for nodes in (graph_def.node, *bodies) for n in nodes)


@VARIABLES
def test_bodies_of_a_model(variables, tmp_path):
    opened = model.open(traced(Layer(variables)), inline=False)
    before = opened.to_function()
    names = list(opened.functions)
    report = fold_batch_norms(opened, strict=True)
    assert len(report.folded) == len(TIMES)
    for entry in report.folded:
        name, _, rest = entry.norm.partition("/")
        assert name in names
        assert rest.endswith("norm")
        assert entry.layer == entry.norm.removesuffix("norm") + "dense"
        assert entry.signature == opened.signature
        body = opened.functions[name]
        ops = {op.name for op in body.graph.get_operations()}
        assert entry.into.removeprefix(f"{name}/") in ops
        ge.verify(body.graph)
    assert sorted(opened.functions) == sorted(names)
    values = opened.run(x=X)
    check(values)
    for name, value in before(X).items():
        np.testing.assert_allclose(values[name], value, rtol=1e-5, atol=1e-6)
    ge.verify(opened.graph)
    again = fold_batch_norms(opened)
    assert (again.folded, again.refused) == ((), ())
    if not variables:
        assert roots(saved_graph(opened, tmp_path)) == 0


def test_bodies_of_a_graph():
    graph, results = imported(traced(Layer(False)))
    report = fold_batch_norms(graph, strict=True)
    assert {entry.norm.rpartition("/")[2] for entry in report.folded} == {"norm"}
    values = evaluate(graph, results.values(), {"x:0": X})
    check(dict(zip(results, values, strict=True)))
    assert called_roots(graph) == 0
    again = fold_batch_norms(graph)
    assert (again.folded, again.refused) == ((), ())


def called_roots(graph):
    """Count the roots in what the ops of a graph call, old functions left out."""
    graph_def = graph.as_graph_def()
    library = {f.signature.name: f for f in graph_def.library.function}
    waiting, seen, count = [graph_def.node], set(), 0
    while waiting:
        for node in waiting.pop():
            count += node.op == "Rsqrt"
            for value in node.attr.values():
                for function in (value.func, *value.list.func):
                    if function.name in library and function.name not in seen:
                        seen.add(function.name)
                        waiting.append(library[function.name].node_def)
    return count


@VARIABLES
def test_bodies_while_a_function_is_traced(variables):
    reports = []
    function = traced(Layer(variables), reports)
    check(function(X))
    assert len(reports[0].folded) == len(TIMES)
    if not variables:
        assert called_roots(function.get_concrete_function().graph) == 0


def test_gradients_flow_through_folded_bodies():
    layer, x = Layer(True), tf.constant(X)
    watched = [x, *layer.values.values()]
    for build in TIMES:
        found = []
        for fold in (None, []):
            function = traced(layer, fold, [build])
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.reduce_sum(function(x)[build.__name__] ** 2)
            found.append(tape.gradient(y, watched))
        for plain, folded in zip(*found, strict=True):
            assert np.abs(plain).max() > 1e-3, build
            np.testing.assert_allclose(folded, plain, rtol=1e-4, atol=1e-5)


def test_constants_that_are_passed_to_a_body(tmp_path):
    # Freezing makes the variables constants of the graph, which is where they are read.
    frozen = model.open(traced(Layer(True)), inline=False).freeze()
    assert not frozen.variables
    graph = in_graph(saved_graph(frozen, tmp_path))
    folded = fold_batch_norms(frozen, strict=True).folded
    assert len(folded) == len(TIMES)
    assert all(entry.norm.endswith("norm") for entry in folded)
    check(frozen.run(x=X))
    assert roots(saved_graph(frozen, tmp_path)) == 0
    again = fold_batch_norms(frozen)
    assert (again.folded, again.refused) == ((), ())
    assert len(fold_batch_norms(graph, strict=True).folded) == len(TIMES)
    assert called_roots(graph) == 0
    names = [build.__name__ for build in TIMES]
    values = evaluate(graph, [f"{name}:0" for name in names], {"x:0": X})
    check(dict(zip(names, values, strict=True)))


def changing(x):
    """A loop whose weights are constant at first, and another in each round."""
    passed = parameters()

    def body(i, y, kernel):
        y = tf.matmul(y, kernel, name="dense")
        y = tf.nn.batch_normalization(y, *passed, 1e-3, "norm")
        return i + 1, y, kernel + 0.1

    loop_vars = [0, x, tf.constant(CONSTANTS["kernel"])]
    shapes = [tf.TensorShape(s) for s in ([], [None, 5], [5, 5])]
    return tf.while_loop(lambda i, *_: i < 3, body, loop_vars, shapes)[1]


def test_functions_that_are_passed_different_constants_stay():
    shared = tf.function(
        lambda x, gamma: tf.nn.batch_normalization(
            tf.matmul(x, CONSTANTS["kernel"]),
            *(tf.constant(CONSTANTS[k]) for k in ("mean", "variance", "beta")),
            gamma,
            1e-3,
        ),
        autograph=False,
    )

    @tf.function(input_signature=[SPEC], autograph=False)
    def function(x):
        gamma = tf.constant(CONSTANTS["gamma"])
        return {"y": shared(x, gamma) + shared(x, tf.constant(np.ones(5, np.float32)))}

    opened = model.open(function, inline=False)
    before = opened.run(x=X)["y"]
    fold_batch_norms(opened)
    np.testing.assert_allclose(opened.run(x=X)["y"], before, rtol=1e-5, atol=1e-5)
    data = reference(X)
    plain = (data - CONSTANTS["beta"]) / CONSTANTS["gamma"] + CONSTANTS["beta"]
    np.testing.assert_allclose(before, data + plain, rtol=1e-4, atol=1e-4)


def weights_from_outside(x):
    kernel = tf.identity(x)[:1] * tf.ones([5, 5])

    def body(i, y):
        y = tf.matmul(y, kernel, name="dense")
        return i + 1, tf.nn.batch_normalization(y, *parameters(), 1e-3, "norm")

    return tf.while_loop(lambda i, y: i < 3, body, [0, x])[1]


@pytest.mark.parametrize("build", [changing, weights_from_outside])
def test_weights_that_depend_on_the_data(build):
    function = tf.function(lambda x: {"y": build(x)}, [SPEC], autograph=False)
    opened = model.open(function, inline=False)
    before = opened.run(x=X)["y"]
    report = fold_batch_norms(opened)
    assert not report.folded
    (entry,) = report.refused
    assert entry.norm.endswith("/norm")
    assert entry.op == entry.norm.removesuffix("norm") + "dense"
    assert "weights depend on the data" in entry.reason
    np.testing.assert_array_equal(opened.run(x=X)["y"], before)


@tf.function(input_signature=[SPEC], autograph=False)
def partly_foldable(x):
    """A norm that can be folded in the graph, one that cannot in a body."""
    y = Layer(False)(x)
    gate = tf.function(
        lambda x: tf.nn.batch_normalization(tf.tanh(x), *parameters(), 1e-3, "gate"),
        autograph=False,
    )
    return {"y": gate(tf.nn.relu(y)) + loop(Layer(False), x)}


def test_strict_leaves_a_model_exactly_as_it_was():
    opened = model.open(partly_foldable, inline=False)
    graph_def = opened.graph.as_graph_def()
    bodies = {name: opened.functions[name] for name in opened.functions}
    states = {name: body.graph.as_graph_def() for name, body in bodies.items()}
    (before,) = opened.run(x=X).values()
    with pytest.raises(FoldError, match=r"1 batch norm.*nothing was changed") as error:
        fold_batch_norms(opened, strict=True)
    assert "gate" in str(error.value)
    assert opened.graph.as_graph_def() == graph_def
    for name, body in bodies.items():
        assert body.graph.as_graph_def() == states[name]
        ge.verify(body.graph)
    ge.verify(opened.graph)
    np.testing.assert_array_equal(opened.run(x=X)["y"], before)


def functions_called(graph):
    """Return the functions that the ops of a graph call."""
    attributes = ("f", "body", "cond", "then_branch", "else_branch")
    nodes = graph.as_graph_def().node
    return {n.attr[a].func.name for n in nodes for a in attributes if a in n.attr}


@pytest.mark.parametrize("function", [partly_foldable, traced(Layer(False))])
def test_a_failure_at_the_end_puts_calls_and_edges_back(function, monkeypatch):
    graph, results = imported(function)
    before = {n.name: n for n in graph.as_graph_def().node}
    expected = evaluate(graph, results.values(), {"x:0": X})
    callees = functions_called(graph)
    made, new_report = [], FoldReport.__init__

    def fail(self, *entries):
        # The last report is made when all is done: other functions are called then.
        made.append(functions_called(graph) != callees)
        if made[-1]:
            raise RuntimeError("later")
        new_report(self, *entries)

    monkeypatch.setattr(FoldReport, "__init__", fail)
    with pytest.raises(RuntimeError, match="later"), ge.allow_stale(graph):
        fold_batch_norms(graph)
    assert made.count(False) > 1
    after = {n.name: n for n in graph.as_graph_def().node}
    for name, node in before.items():
        assert list(after[name].input) == list(node.input)
        for attribute in ("f", "body", "cond"):
            if attribute in node.attr:
                assert after[name].attr[attribute] == node.attr[attribute]
    for value, y in zip(
        evaluate(graph, results.values(), {"x:0": X}), expected, strict=True
    ):
        np.testing.assert_array_equal(value, y)


@pytest.mark.parametrize(
    ("scope", "folded"),
    [("norm", {"norm"}), ("BODY/", {"BODY/while/norm"}), ("no", set())],
)
def test_the_scope_counts_from_the_name_of_the_body(scope, folded):
    opened = model.open(partly_foldable, inline=False)
    body = next(n for n in opened.functions if "body" in n)
    report = fold_batch_norms(opened, scope=scope.replace("BODY", body), strict=True)
    assert {entry.norm.replace(body, "BODY") for entry in report.folded} == folded
    assert len(report.folded) + len(report.refused) == 3


def test_functions_that_data_pipelines_call():
    data = np.ones([2, 5], np.float32)
    with tf.Graph().as_default() as graph:
        dataset = tf.data.Dataset.from_tensors(data)
        dataset = dataset.map(lambda x: tf.tanh(Layer(False)(x)))
        y = tf.compat.v1.data.make_one_shot_iterator(dataset).get_next()
    assert len(fold_batch_norms(graph, strict=True).folded) == 1
    assert called_roots(graph) == 0
    (value,) = evaluate(graph, [y])
    np.testing.assert_allclose(value, np.tanh(reference(data)), rtol=1e-5, atol=1e-6)


def legacy_graph(build):
    """Return a graph with an op that calls a function by being of its type."""
    body = traced(Layer(False), builds=[build]).get_concrete_function().graph
    (op,) = [op for op in body.get_operations() if "Partitioned" in op.type]
    graph_def = body.as_graph_def()
    for node in graph_def.node:
        if node.name == op.name:
            node.op = node.attr["f"].func.name
            node.attr.clear()
    return in_graph(graph_def)


def call_of_call(layer, x):
    return tf.function(lambda x: call(layer, x) + 0.0, autograph=False)(x)


# What a function calls that cannot be changed cannot be changed either.
@pytest.mark.parametrize("build", [call, call_of_call])
def test_functions_that_are_types_of_ops_are_refused(build):
    graph = legacy_graph(build)
    before = graph.as_graph_def()
    report = fold_batch_norms(graph)
    assert not report.folded
    (entry,) = report.refused
    assert entry.norm.endswith("/norm")
    assert "geutil.model.open" in entry.reason
    assert graph.as_graph_def() == before
    opened = model.open(graph, inline=False)
    assert len(fold_batch_norms(opened, strict=True).folded) == 1
    (y,) = opened.run(x=X).values()
    np.testing.assert_allclose(y, repeated(1), rtol=1e-5, atol=1e-6)


def test_functions_that_cannot_be_opened_are_refused():
    made, _ = imported(traced(Layer(False), builds=[call]))
    graph_def = made.as_graph_def()
    # The function takes a list of tensors, of a length that each call tells.
    (caller,) = (n for n in graph_def.node if n.op.endswith("PartitionedCall"))
    caller.attr["f"].func.attr["N"].i = 1
    (function,) = graph_def.library.function
    function.signature.attr.add(name="N", type="int")
    function.signature.input_arg[0].name = "x"
    function.signature.input_arg[0].number_attr = "N"
    graph = in_graph(graph_def)
    report = fold_batch_norms(graph)
    (entry,) = report.refused
    assert f"cannot be opened: 'x' of function '{entry.norm}' is a list" in entry.reason
    assert graph.get_operation_by_name(entry.op).type.endswith("PartitionedCall")
    with pytest.raises(FoldError, match="cannot be opened"):
        fold_batch_norms(graph, strict=True)


def test_graphs_that_a_session_has_run_or_finalized_are_left_as_they_are():
    graph, results = imported(traced(Layer(False), builds=[call]))
    (y,) = results.values()
    calls = [op for op in graph.get_operations() if "Partitioned" in op.type]
    before = [op.node_def for op in calls]
    with tf.compat.v1.Session(graph=graph) as session:
        session.run(y, {"x:0": X})
        with pytest.raises(StaleGraphError):
            fold_batch_norms(graph)
    assert [op.node_def for op in calls] == before
    before = graph.as_graph_def()
    graph.finalize()
    with pytest.raises(FinalizedGraphError):
        fold_batch_norms(graph)
    assert graph.as_graph_def() == before


def test_a_function_that_several_call_is_folded_for_all():
    layer = Layer(False)
    shared = tf.function(lambda x: tf.tanh(layer(x)), autograph=False)

    @tf.function(input_signature=[SPEC], autograph=False)
    def function(x):
        other = tf.function(shared.python_function, autograph=False)
        return {"y": other(x) + shared(x) + loop(shared, x)}

    graph, results = imported(function)
    (y,) = results.values()
    (expected,) = evaluate(graph, [y], {"x:0": X})
    assert len(fold_batch_norms(graph, strict=True).folded) >= 1
    assert called_roots(graph) == 0
    (value,) = evaluate(graph, [y], {"x:0": X})
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


def test_side_effects_of_bodies_stay():
    layer, count, reports = Layer(False), tf.Variable(0), []

    def counting(layer, x):
        def body(x):
            count.assign_add(1)
            return tf.tanh(layer(x))

        return tf.function(body, autograph=False)(x)

    function = traced(layer, reports, [counting])
    y = function(X)["counting"]
    assert len(reports[0].folded) == 1
    np.testing.assert_allclose(y, repeated(1), rtol=1e-5, atol=1e-6)
    assert int(count) == 1
