"""Reference variables of version 1, and what freezing leaves of variables."""

import contextlib
from functools import partial

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from geutil import model
from tests.model.refusal_tables import not_refused
from tests.settings import control_flow

v1 = tf.compat.v1
GLOBAL = v1.GraphKeys.GLOBAL_VARIABLES
X = np.float32([[1.0, -2.0, 3.0], [0.5, 4.0, -1.0], [2.0, 1.0, 0.0]])


def ref_variable(value, name):
    return v1.get_variable(
        name, initializer=tf.constant(value), use_resource=False, dtype=tf.float32
    )


def test_values_are_read_where_they_were():
    # A Session returns 13 for `before` too: it hands out the buffer that is updated
    # later. Resource variables do not, so the value is that of the read's time.
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [], "x")
        w = ref_variable(10.0, "w")
        before = tf.identity(w.read_value(), name="before")
        with tf.control_dependencies([before]):
            updated = v1.assign_add(w, x, name="update")
        tf.multiply(updated, 2.0, name="doubled")
    m = model.open(graph.as_graph_def(), outputs=["before", "doubled", "update"])
    m.variables["w"].assign(10.0)
    found = m.run(x=3.0)
    assert [float(v) for v in found.values()] == [10.0, 26.0, 13.0]
    assert float(m.variables["w"]) == 13.0


def test_nodes_may_come_in_any_order():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [], "x")
        w = ref_variable(1.0, "w")
        first = v1.assign(w, x)
        second = v1.assign_add(first, 2.0)
        third = v1.assign_sub(second, 0.5)
        tf.identity(third * 2.0, name="y")
    graph_def = graph.as_graph_def()
    turned = v1.GraphDef(versions=graph_def.versions, node=graph_def.node[::-1])
    before = turned.SerializeToString(deterministic=True)
    m = model.open(turned, outputs=["y"])
    assert turned.SerializeToString(deterministic=True) == before
    m.variables["w"].assign(0.0)
    assert float(m.run(x=3.0)["y"]) == 9.0
    assert float(m.variables["w"]) == 4.5


def counter(read):
    def build(x):
        step = ref_variable(0.0, "step")
        with tf.control_dependencies([v1.assign_add(step, 1.0)]):
            return read(x, step)

    return build


def counter_in_branch(x):
    step = ref_variable(0.0, "step")

    def counted():
        with tf.control_dependencies([v1.assign_add(step, 1.0)]):
            return x * step

    return v1.cond(x > 0.0, counted, lambda: x)


def counter_in_loop(x):
    step = ref_variable(0.0, "step")

    def counted(i, total):
        with tf.control_dependencies([v1.assign_add(step, 1.0)]):
            return i + 1, total + x * step

    _, total = v1.while_loop(
        lambda i, _: i < 3, counted, [0, 0.0], parallel_iterations=1
    )
    return total


COUNTERS = {
    "a product": counter(lambda x, step: x * step),
    "an identity": counter(lambda x, step: x * tf.identity(step)),
    "behind what waits": counter(lambda x, step: tf.exp(tf.identity(x)) * step),
    "a variable twice": counter(lambda x, step: tf.stack([x, step, step])),
    "the change itself": lambda x: x * v1.assign_add(ref_variable(0.0, "step"), 1.0),
    "in a branch": counter_in_branch,
    "in a loop": counter_in_loop,
}


def test_what_comes_after_a_change_sees_it():
    """An Identity of a reference shares its buffer, as a Switch and an Enter do."""
    wrong = {}
    for name, build in COUNTERS.items():
        with tf.Graph().as_default() as graph, control_flow(1):
            x = v1.placeholder(tf.float32, [], "x")
            tf.identity(build(x), name="y")
        with v1.Session(graph=graph) as session:
            (step,) = graph.get_collection(GLOBAL)
            session.run(step.initializer)
            expected = [session.run("y:0", {x: 2.0}) for _ in range(4)]
        m = model.open(graph.as_graph_def(), outputs=["y"])
        m.variables["step"].assign(0.0)
        found = [m.run(x=2.0)["y"] for _ in range(4)]
        if not np.allclose(found, expected, rtol=1e-6):
            wrong[name] = found, expected
    assert wrong == {}


OF_OTHERS = ("Accumulator", "Barrier", "Lookup", "Queue", "Reader", "Stack", "Tensor")
"""How ops begin that take references which no variable hands out."""


def updates():
    """Return the types of ops that change a reference variable, by the registry."""
    kinds = []
    for kind in sorted(dir(tf.raw_ops)):
        definition = op_def_registry.get(kind)
        if definition is None or kind.startswith(OF_OTHERS):
            continue
        refs = [arg.name for arg in definition.input_arg if arg.is_ref]
        if refs and (
            op_def_registry.get(f"Resource{kind}") or kind.startswith("Assign")
        ):
            kinds.append(kind)
    return kinds


def argument(kind, name):
    """Return what an op that changes a variable of 3 x 3 gets for an argument."""
    if name == "indices":
        return [[0], [2]] if "ScatterNd" in kind else [0, 2]
    if name in ("begin", "end", "strides"):
        return {"begin": [0, 1], "end": [2, 3], "strides": [1, 1]}[name]
    if name == "updates" or (name == "grad" and "Sparse" in kind):
        return X[:2] + 0.25
    if name in ("delta", "grad", "value"):
        return X[:2, 1:] * 2.0 if kind == "StridedSliceAssign" else X * 0.5 + 0.125
    if name == "global_step":
        return tf.constant(2, tf.int64)
    return -0.5 if name == "lr_power" else 0.5


def prepared(kind):
    """Make variables for an op that changes some; return the call that adds it."""
    definition = op_def_registry.get(kind)
    start = np.int32(1) if kind == "CountUpTo" else np.abs(X) + 0.5
    refs = {
        arg.name: v1.get_variable(
            f"{kind}/{arg.name}", initializer=start, use_resource=False
        )
        for arg in definition.input_arg
        if arg.is_ref
    }
    first = next(iter(refs.values()))

    def call():
        arguments = {name: variable._ref() for name, variable in refs.items()}
        for arg in definition.input_arg:
            if not arg.is_ref:
                arguments[arg.name] = argument(kind, arg.name)
        if kind == "CountUpTo":
            arguments["limit"] = 9
        return getattr(tf.raw_ops, kind)(**arguments)

    return call, first


def looped(call, first, _):
    def body(i, value):
        with tf.control_dependencies([value]):
            return i + 1, tf.identity(call())

    return tf.while_loop(lambda i, _: i < 2, body, [0, tf.zeros_like(first)])[1]


SOME = (
    "Assign",
    "AssignSub",
    "ApplyAdam",
    "CountUpTo",
    "ScatterNdSub",
    "ScatterUpdate",
)
FORMS = {
    "a branch that hands a reference out": (
        updates(),
        lambda call, first, go: tf.cond(go, call, first._ref) + 1,
    ),
    "plain": (SOME, lambda call, first, go: call() + 1),
    "a branch": (
        SOME,
        lambda call, first, go: tf.cond(
            go, lambda: tf.identity(call()), lambda: tf.zeros_like(first)
        ),
    ),
    "a loop": (SOME, looped),
}


def test_ops_that_change_variables_do_so_in_branches_and_loops(caplog):
    """All ops that TensorFlow has, next to a Session."""
    assert len(updates()) > 40
    wrong = {}
    for form, (kinds, build) in FORMS.items():
        with control_flow(1), tf.Graph().as_default() as graph:
            go = v1.placeholder(tf.bool, [], "go")
            made = {kind: prepared(kind) for kind in kinds}
            outputs = {kind: build(*made[kind], go) for kind in kinds}
            variables = {v.op.name: v for v in v1.global_variables()}
            start = v1.global_variables_initializer()
        with contextlib.closing(v1.Session(graph=graph)) as session:
            session.run(start)
            m = model.open(graph, outputs=outputs, session=session)
            for taken in (True, False):
                expected = session.run(outputs, {go: taken})
                found = m.run(go=taken)
                expected |= session.run(variables)
                found |= {name: v.numpy() for name, v in m.variables.items()}
                for name, value in expected.items():
                    if not np.array_equal(found[name], value, equal_nan=True):
                        wrong[form, taken, name] = (found[name], value)
            if kinds != SOME:
                # Frozen, the branch without changes is right, and each change is told.
                ends = {kind: t.name for kind, t in outputs.items()}
                graph_def = with_constants(graph, session.run(variables), ends.values())
                caplog.clear()
                frozen = model.open(graph_def, outputs=ends).run(go=False)
                wrong |= {
                    (form, "frozen", kind): frozen[kind]
                    for kind, value in session.run(outputs, {go: False}).items()
                    if not np.array_equal(frozen[kind], value, equal_nan=True)
                    or f"changes '{kind}/" not in caplog.text
                }
    assert wrong == {}


def batch_norm(x, phase, use_resource):
    """A batch norm as slim writes it: a branch updates the moving averages."""
    with v1.variable_scope("bn", use_resource=use_resource):
        mean = v1.get_variable("mean", initializer=np.float32([0.5, 1, -1]))
        variance = v1.get_variable("variance", initializer=np.float32([2, 3, 0.5]))
        of_batch = tf.nn.moments(x, [0])

    def train():
        averages = zip((mean, variance), of_batch, strict=True)
        steps = [v1.assign_sub(v, (v - new) * 0.125) for v, new in averages]
        with tf.control_dependencies(steps):
            return [tf.identity(t) for t in of_batch]

    moments = tf.cond(phase, train, lambda: [mean, variance])
    return tf.nn.batch_normalization(x, *moments, None, None, 1e-3)


def counted(x, go, use_resource):
    """Updates in order, of which the last is read; and a test of the variable."""
    v = v1.get_variable("v", initializer=2.0, use_resource=use_resource)

    def count():
        with tf.control_dependencies([v1.assign_add(v, 3.0)]):
            last = v1.assign_sub(v, x[0, 0])
        with tf.control_dependencies([last]):
            return v.read_value() * x[0, 1]

    ready = tf.cast(v1.is_variable_initialized(v), tf.float32)
    return tf.cond(go, count, lambda: v * 1.0) + ready


def rows(x, go, use_resource):
    table = v1.get_variable("table", initializer=X, use_resource=use_resource)
    chosen = tf.cond(
        go, lambda: tf.gather(table, [2, 0]), lambda: tf.gather(table, [1, 1])
    )
    return chosen + tf.gather_nd(table, [[0, 1], [2, 2]])[:, None] * x[:2]


def summed(x, go, use_resource):
    w = v1.get_variable("w", initializer=X, use_resource=use_resource)
    total = tf.while_loop(lambda i, _: i < 3, lambda i, t: (i + 1, t @ w), [0, x])[1]
    return tf.where(go, total, x)


def read(x, go, use_resource):
    """A branch that returns variables, as values."""
    rows = [
        v1.get_variable(f"v{i}", initializer=X[i % 3], use_resource=use_resource)
        for i in range(8)
    ]
    chosen = tf.cond(go, lambda: list(rows), lambda: [v - 1.0 for v in rows])
    return x * tf.add_n(chosen)


def called(x, go, use_resource):
    w = v1.get_variable("w", initializer=X, use_resource=use_resource)
    return tf.where(go, tf.function(lambda t: t @ w, autograph=False)(x), x)


def referred(x, go, use_resource):
    """Loops and branches that hand references on, which handles do not need."""
    v = v1.get_variable("v", initializer=1.0, use_resource=False)
    _, looped = tf.while_loop(
        lambda i, _: i < 3,
        lambda i, r: (i + 1, v1.assign_add(r, x[0, 0])),
        [0, v._ref()],
    )
    again = tf.raw_ops.RefIdentity(input=looped)
    chosen = tf.cond(go, lambda: v1.assign_sub(again, 1.0), lambda: again)
    return tf.raw_ops.RefIdentity(input=chosen) * 2.0


CHANGES = {"batch_norm": 2, "counted": 2, "referred": 2}
"""How many updates freezing leaves without a variable."""
NETS = {
    f.__name__: f for f in (batch_norm, counted, rows, summed, read, called, referred)
}


def built(net, version, use_resource):
    with control_flow(version), tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [3, 3], "x")
        go = v1.placeholder(tf.bool, [], "go")
        tf.identity(net(x, go, use_resource), "y")
        v1.global_variables_initializer()
    return graph


def with_constants(graph, values, ends=("y",)):
    """Freeze a graph as scripts of version 1 did: other ops are left as they are."""
    names = [end.removesuffix(":0") for end in ends]
    frozen = v1.graph_util.extract_sub_graph(graph.as_graph_def(), names)
    for node in frozen.node:
        if node.op in ("VarHandleOp", "VariableV2"):
            value = tf.make_tensor_proto(values[node.name])
            constant = v1.NodeDef(name=node.name, op="Const")
            constant.attr["dtype"].type = value.dtype
            constant.attr["value"].tensor.CopyFrom(value)
            node.CopyFrom(constant)
    return frozen


def with_constants_of_v2(session, graph, values):
    """Freeze a graph as TensorFlow 2 does, which makes no values of some handles."""
    convert = v1.graph_util.convert_variables_to_constants
    return convert(session, graph.as_graph_def(), ["y"])


def test_graphs_and_what_is_left_when_they_are_frozen(caplog):
    """Next to a Session with the variables, which are set back for each run."""
    wrong = {}
    cases = [(net, 1, False) for net in NETS if net != "called"]
    cases += [(net, v, True) for net in NETS if net != "referred" for v in (1, 2)]
    for case in cases:
        net, version, use_resource = case
        graph = built(NETS[net], version, use_resource)
        with contextlib.closing(v1.Session(graph=graph)) as session:
            variables = {v.op.name: v for v in graph.get_collection(GLOBAL)}
            session.run("init")
            values = session.run(variables)
            m = model.open(graph, inputs=["x", "go"], outputs=["y"], session=session)
            opened = [m]
            for freeze in (with_constants, partial(with_constants_of_v2, session)):
                caplog.clear()
                opened.append(model.open(freeze(graph, values), outputs=["y"]))
                told = caplog.text.count("changes '")
                if told != CHANGES.get(net, 0) or opened[-1].variables:
                    wrong[case, len(opened)] = (caplog.text, opened[-1].variables)
            for go in (False, True):
                session.run("init")
                expected = session.run("y:0", {"x:0": X, "go:0": go})
                for name, value in values.items():
                    m.variables[name].assign(value)
                # TensorFlow 2 leaves no sign of which reads come after a change.
                blind = net == "counted" and go
                for number, each in enumerate(opened[: 2 if blind else 3]):
                    found = each.run(x=X, go=go)["y"]
                    if not np.allclose(found, expected, rtol=1e-6):
                        wrong[case, go, number] = (found, expected)
    assert wrong == {}


def test_a_saved_model_and_its_frozen_graph_are_stripped_and_saved(tmp_path):
    """Next to TensorFlow, which runs the SavedModel."""
    graph = built(batch_norm, 1, use_resource=False)
    with graph.as_default(), v1.Session() as session:
        session.run("init")
        x, go, y = (graph.get_tensor_by_name(f"{name}:0") for name in ("x", "go", "y"))
        save = v1.saved_model.simple_save
        save(session, str(tmp_path / "m"), {"x": x, "go": go}, {"y": y})
        values = session.run({v.op.name: v for v in v1.global_variables()})
    m = model.open(tmp_path / "m")
    assert sorted(m.variables) == ["bn/mean", "bn/variance"]
    loaded = tf.saved_model.load(str(tmp_path / "m")).signatures["serving_default"]
    path = m.save(tmp_path / "again")
    again = tf.saved_model.load(str(path)).signatures["serving_default"]
    for go in (False, True, False, True, False):
        expected = loaded(x=tf.constant(X), go=tf.constant(go))["y"]
        np.testing.assert_allclose(m.run(x=X, go=go)["y"], expected, rtol=1e-6)
        found = again(x=tf.constant(X), go=tf.constant(go))["y"]
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    frozen = model.open(with_constants(graph, values), outputs=["y"])
    expected = frozen.run(x=X, go=False)["y"]
    stripped = frozen.strip_training(switches={"go": False})
    stripped = model.open(stripped.save(tmp_path / "frozen.pb", "graph_def"))
    assert list(stripped.inputs) == ["x"]
    np.testing.assert_array_equal(stripped.run(x=X)["y"], expected)


def test_what_cannot_do_without_the_variable_is_refused_where_outputs_need_it():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [], "x")
        pair = [ref_variable(value, f"v{value:.0f}")._ref() for value in (1.0, 2.0)]
        chosen = tf.raw_ops.RefSelect(index=1, inputs=pair, name="chosen")
        tf.multiply(chosen, x, name="y")
        tf.multiply(pair[0], x, name="z")
        state = v1.get_variable("state", initializer=np.arange(3))
        drawn = tf.raw_ops.StatefulUniform(
            resource=state.handle,
            algorithm=1,
            shape=[2],
            dtype=tf.float32,
            name="drawn",
        )
        tf.multiply(drawn, x, name="random")
    graph_def = graph.as_graph_def()
    m = model.open(graph_def, outputs=["z"])
    m.variables["v1"].assign(3.0)
    assert float(m.run(x=2.0)["z"]) == 6.0
    frozen = with_constants(graph, {"state": [0, 1, 2]}, ["random"])
    select, random = (
        partial(model.open, opened, outputs=[name])
        for opened, name in ((graph_def, "y"), (frozen, "random"))
    )
    cases = [
        ("select", select, r"'chosen' \(RefSelect\).*'v[12]'.*freeze"),
        ("random", random, r"frozen with.*'drawn' \(StatefulUniform\).*'state'"),
    ]
    assert not_refused(model.ModelError, cases) == {}
