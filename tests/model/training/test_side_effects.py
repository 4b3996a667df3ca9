"""Diagnostics, writes of variables and switches: which go, which stay."""

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from tests.model.training.helpers import by_name, is_deterministic, kinds, types_of
from tests.settings import control_flow

v1 = tf.compat.v1
SPEC = tf.TensorSpec([None], name="x")
X = np.array([1.0, 2.0], np.float32)


def opened(body):
    return model.open(tf.function(lambda x: {"y": body(x)}, [SPEC], autograph=False))


def checked(x):
    tf.debugging.assert_positive(x)
    tf.debugging.assert_equal(tf.size(x) * 0, 0)
    tf.print("x is", x)
    return tf.debugging.check_numerics(x, "x") + 1.0


def test_diagnostics_go(capfd):
    m = opened(checked)
    with pytest.raises(tf.errors.OpError):
        m.run(x=-X)
    stripped = m.strip_training()
    capfd.readouterr()
    np.testing.assert_array_equal(stripped.run(x=-X)["y"], 1 - X)
    assert "x is" not in capfd.readouterr().err
    ops = {"Assert", "If", "PrintV2", "StringFormat", "CheckNumerics", "NoOp"}
    assert not ops & {op.type for op in stripped.graph.get_operations()} - {"NoOp"}
    assert kinds(stripped.strip_report.removed) == ["diagnostic"]
    assert len(stripped.strip_report.removed) == 4


@pytest.mark.parametrize("version", [1, 2])
def test_diagnostics_of_version_1_go(version):
    with control_flow(version), tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None], name="x")
        with tf.control_dependencies([v1.assert_positive(x)]):
            y = v1.Print(x * 2.0, [x])
        v1.summary.scalar("mean", tf.reduce_mean(y))
        tf.identity(y, name="y")
    m = model.open(graph, outputs=["y"])
    stripped = m.strip_training()
    assert types_of(stripped) <= {"Placeholder", "Const", "Mul", "Identity", "NoOp"}
    np.testing.assert_array_equal(stripped.run(x=-X)["y"], -2 * X)


def test_summaries_counters_and_optimizer_steps_go(tmp_path):
    writer = tf.summary.create_file_writer(str(tmp_path))
    count = tf.Variable(0, trainable=False, name="count")
    w = tf.Variable([2.0], name="w")

    def body(x):
        with writer.as_default(step=1):
            tf.summary.write("total", tf.reduce_sum(x))
        # Nothing reads it.
        count.assign_add(1)
        y = x * w
        tf.raw_ops.ResourceApplyGradientDescent(
            var=w.handle, alpha=0.1, delta=tf.reduce_sum(y, keepdims=True)
        )
        return y

    stripped = opened(body).strip_training()
    types = {"Placeholder", "ReadVariableOp", "Const", "Mul", "Identity", "NoOp"}
    assert types_of(stripped) <= types
    np.testing.assert_array_equal(stripped.run(x=X)["y"], X * 2)
    np.testing.assert_array_equal(w, [2.0])
    assert count.numpy() == 0
    assert list(stripped.variables) == ["w"]
    removed = stripped.strip_report.removed
    assert {"side effect", "variable"} <= set(kinds(removed))
    assert "it trains 'w'" in [entry.reason for entry in removed]


def test_a_summary_that_is_an_output_stays():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [], name="x")
        v1.summary.scalar("y", x)
    stripped = model.open(graph, outputs=["y"]).strip_training()
    assert "ScalarSummary" in types_of(stripped)
    assert by_name(stripped)["y"].action == "kept"


def test_a_state_that_outputs_read_stays():
    state = tf.Variable(0.0, name="state")
    used = tf.Variable(0.0, name="used")
    unread = tf.Variable(0.0, name="unread")

    def body(x):
        y = x + state
        state.assign(tf.reduce_sum(y) + used)
        used.assign_add(1.0)
        unread.assign(used * 2.0)
        return y

    m = opened(body)
    stripped = m.strip_training()
    assert list(stripped.variables) == ["state", "used"]
    actions = [e.action for e in stripped.strip_report.entries]
    assert sorted(actions) == ["kept", "kept", "removed", "removed"]
    values = [stripped.run(x=X)["y"].copy() for _ in range(3)]
    for v in (state, used, unread):
        v.assign(0.0)
    np.testing.assert_array_equal(values, [m.run(x=X)["y"] for _ in range(3)])


def test_a_state_that_another_signature_reads_stays(tmp_path):
    module = tf.Module()
    module.count = tf.Variable(0, name="count")

    @tf.function(input_signature=[SPEC])
    def serve(x):
        module.count.assign_add(1)
        return {"y": x}

    @tf.function(input_signature=[])
    def count():
        return {"count": module.count.read_value()}

    tf.saved_model.save(
        module, str(tmp_path / "m"), {"serving_default": serve, "count": count}
    )
    stripped = model.open(tmp_path / "m").strip_training()
    (entry,) = stripped.strip_report.entries
    assert entry.action == "kept" and "signature 'count'" in entry.reason
    stripped.run(x=X)
    assert stripped.signatures["count"].run()["count"] == 1


def test_other_side_effects_stay():
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    twice = tf.function(lambda x: 2.0 * x, [SPEC], autograph=False)

    def body(x):
        table.insert("seen", 1)
        call = twice.get_concrete_function()
        call.add_to_graph(x.graph)
        function = v1.AttrValue().func
        function.name = call.name
        place = tf.constant("/job:localhost/replica:0/task:0/device:CPU:0")
        tf.raw_ops.RemoteCall(target=place, args=[x], Tout=[tf.float32], f=function)
        return x + 1.0

    stripped = opened(body).strip_training()
    entries = stripped.strip_report.entries
    assert [entry.action for entry in entries] == ["kept", "kept"]
    reasons = " ".join(entry.reason for entry in entries)
    assert "LookupTableInsert" in reasons and "RemoteCall" in reasons
    np.testing.assert_array_equal(stripped.run(x=X)["y"], X + 1.0)
    assert table.lookup(tf.constant("seen")).numpy() == 1


@pytest.mark.parametrize(
    "make_check",
    [
        lambda x: tf.raw_ops.Assert(condition=True, data=[x]),
        # A conditional whose result is waited for.
        v1.assert_positive,
    ],
)
def test_what_waited_for_a_dropped_op_waits_for_what_that_waited_for(make_check):
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None], name="x")
        v = v1.get_variable("v", initializer=1.0, use_resource=True)
        first = v.assign_add(1.0, read_value=False)
        with tf.control_dependencies([first]):
            check = make_check(x)
        with tf.control_dependencies([check]):
            tf.add(x, v.read_value(), name="y")
        session = v1.Session(graph=graph)
        session.run(v1.global_variables_initializer())
    m = model.open(graph, session=session, outputs=["y"])
    stripped = m.strip_training()
    assert not {"Assert", "If"} & types_of(stripped)
    np.testing.assert_array_equal(stripped.run(x=X)["y"], X + 2)
    np.testing.assert_array_equal(stripped.run(x=X)["y"], X + 3)


def test_constants_of_a_branch_still_die_with_it():
    with control_flow(1), tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None], name="x")
        flag = v1.placeholder(tf.bool, [], name="flag")
        v1.Print(x, [x])
        y = v1.cond(flag, lambda: tf.constant(1.0), lambda: tf.constant(2.0))
        tf.add(v1.Print(x, [x]), y, name="y")
    stripped = model.open(graph, outputs=["y"]).strip_training()
    assert "Print" not in types_of(stripped)
    for flag, added in ((True, 1), (False, 2)):
        np.testing.assert_array_equal(stripped.run(x=X, flag=flag)["y"], X + added)


# -- switches between training and inference -------------------------------------------

ROW = np.array([[1.0, -2.0, 3.0]], np.float32)


def graph_of(version, choose, name="is_training", default=None):
    """Return a graph in which a placeholder decides between dropout and x * 2."""
    with tf.Graph().as_default() as graph, control_flow(version):
        x = v1.placeholder(tf.float32, [None, 3], name="x")
        if default is None:
            training = v1.placeholder(tf.bool, [], name=name)
        else:
            training = v1.placeholder_with_default(default, [], name=name)
        tf.identity(choose(training, x), name="y")
    return graph


def check_stripped(m, expected=ROW * 2, **options):
    """Strip a model of an x, check what is left of it, and return that."""
    stripped = m.strip_training(**options)
    assert list(stripped.inputs) == ["x"]
    np.testing.assert_array_equal(stripped.run(x=ROW)["y"], expected)
    return stripped


def by_cond(training, x):
    return v1.cond(training, lambda: tf.nn.dropout(x, rate=0.5), lambda: x * 2.0)


def by_nested_cond(training, x):
    def otherwise():
        return v1.cond(tf.logical_not(training), lambda: x * 2.0, lambda: x - 1.0)

    return v1.cond(training, lambda: tf.nn.dropout(x, rate=0.5), otherwise)


def by_where(training, x):
    return tf.where(training, tf.nn.dropout(x, rate=0.5), x * 2.0)


def by_case(training, x):
    index = tf.cast(training, tf.int32)
    branches = [lambda: x * 2.0, lambda: tf.nn.dropout(x, rate=0.5)]
    return tf.switch_case(index, branches)


def by_expression(training, x):
    return by_cond(tf.logical_and(training, tf.constant(True)), x)


CHOICES = [by_cond, by_nested_cond, by_where, by_case, by_expression]


def in_every_way(training, x):
    return tf.stack([choose(training, x) for choose in CHOICES])


@pytest.mark.parametrize("version", [1, 2])
def test_the_branch_of_inference_is_left(version):
    m = model.open(graph_of(version, in_every_way))
    assert list(m.inputs) == ["x", "is_training"]
    stripped = check_stripped(m, m.run(x=ROW, is_training=False)["y"])
    check_stripped(m, [ROW * 2] * len(CHOICES))
    assert is_deterministic(stripped)
    assert not {"If", "StatelessIf", "Case", "Merge", "Switch"} & types_of(stripped)
    assert by_name(stripped)["is_training"].action == "removed"


def test_a_placeholder_with_a_default_is_a_switch():
    graph = graph_of(1, by_cond, "keras_learning_phase", True)
    for inputs in (None, ["x", "keras_learning_phase"]):
        m = model.open(graph, inputs=inputs)
        assert list(m.inputs) == (inputs or ["x"])
        assert is_deterministic(check_stripped(m))
    found = m.run(x=ROW, keras_learning_phase=False)["y"]
    np.testing.assert_array_equal(found, ROW * 2)


def test_a_placeholder_that_is_no_input_is_a_switch():
    m = model.open(graph_of(2, by_cond), inputs=["x"])
    with pytest.raises(model.ModelError, match="'is_training' is no input"):
        m.run(x=ROW)
    check_stripped(m)


def test_another_name_is_reported_and_can_be_given():
    m = model.open(graph_of(2, by_cond, "noisy"))
    left = m.strip_training()
    assert list(left.inputs) == ["x", "noisy"]
    assert "switches={'noisy': False}" in by_name(left)["noisy"].reason
    check_stripped(m, switches={"noisy": False})


def test_a_switch_is_true_a_number_or_kept():
    def choose(training, x):
        return v1.cond(training, lambda: x * 3.0, lambda: x)

    m = model.open(graph_of(2, choose))
    check_stripped(m, ROW * 3, switches={"is_training": True})
    kept = m.strip_training(keep=["is_training"])
    assert list(kept.inputs) == ["x", "is_training"]
    assert by_name(kept)["is_training"].reason == "it is in keep"
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 3], name="x")
        factor = v1.placeholder(tf.float32, [], name="factor")
        tf.multiply(x, factor, name="y")
    check_stripped(model.open(graph), ROW * 4, switches={"factor": 4.0})


def test_a_choice_that_broadcasts_keeps_its_shape():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 3], name="x")
        row = v1.placeholder(tf.float32, [None, 3], name="row")
        training = v1.placeholder(tf.bool, [], name="is_training")
        tf.where(training, x, row, name="y")
    stripped = model.open(graph).strip_training()
    result = stripped.run(x=np.ones([4, 3]), row=ROW)["y"]
    np.testing.assert_array_equal(result, np.broadcast_to(ROW, [4, 3]))


def test_calls_that_were_kept_are_not_inlined():
    @tf.function(autograph=False)
    def double(x):
        return x * 2.0

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, 3], name="x"),
            tf.TensorSpec([], tf.bool),
        ],
        autograph=False,
    )
    def f(x, is_training):
        chosen = tf.cond(is_training, lambda: tf.nn.dropout(x, rate=0.5), lambda: x)
        return {"y": double(chosen)}

    m = model.open(f, inline=False)
    types = types_of(check_stripped(m))
    assert types & {"PartitionedCall", "StatefulPartitionedCall"}
    assert "If" not in types


@pytest.mark.parametrize("version", [1, 2])
def test_loops_of_version_1(version):
    def looped(training, x):
        def body(i, y):
            with tf.control_dependencies([v1.assert_less(tf.reduce_sum(y), 1e9)]):
                y = tf.identity(y)
            y = v1.cond(training, lambda: y * 5.0, lambda: y + tf.constant(0.0))
            return i + 1, tf.nn.dropout(y, rate=0.5) * 2.0

        return tf.while_loop(lambda i, _: i < 3, body, [0, x])[1]

    m = model.open(graph_of(version, looped), outputs=["y"])
    if version == 2:
        entry = by_name(m.strip_training())["while"]
        assert entry.kind == "body" and "RandomUniform" in entry.reason
        return
    stripped = check_stripped(m, ROW * 8)
    assert is_deterministic(stripped) and "Assert" not in types_of(stripped)
