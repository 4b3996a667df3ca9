"""Models with control flow, effects, random numbers, and functions that stay calls."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from geutil import model as geutil_model
from geutil.model import ModelError
from tests.model.round_trips import assert_round_trip, assert_same, loaded_function
from tests.thorough import crossed

FLOATS = tf.TensorSpec([None], name="x")
X = np.float32([1, -2, 3])


@tf.function
def conditional(x):
    y = x - 1
    if tf.reduce_sum(x) > 0:
        y = x * 2
    return {"y": y}


@tf.function
def counted_loop(x):
    y = x
    for i in tf.range(4):
        if tf.equal(i, 2):
            continue
        y = y + tf.cast(i, tf.float32)
    return {"y": y}


@tf.function
def loop_to_a_limit(x):
    while tf.reduce_max(tf.abs(x)) < 100.0:
        x = x * 3
    return {"y": x}


@tf.function
def nested_loops(x):
    total = tf.zeros([])
    for i in tf.range(3):
        for j in tf.range(i):
            total += tf.cast(i * 10 + j, tf.float32) * tf.reduce_sum(x)
    return {"y": total}


@tf.function
def mapped(x):
    return {"y": tf.map_fn(lambda v: tf.stack([v, v * v]), x)}


@tf.function
def array(x):
    rows = tf.TensorArray(tf.float32, size=0, dynamic_size=True)
    for i in tf.range(tf.size(x)):
        rows = rows.write(i, x[i] * tf.cast(i, tf.float32))
    return {"y": rows.stack()}


@tf.function
def scanned(x):
    return {"y": tf.scan(lambda a, b: a + b, x)}


@tf.function
def switched(x):
    index = tf.cast(tf.size(x), tf.int32) - 2
    branches = [lambda: x, lambda: x + 1, lambda: tf.reverse(x, [0])]
    return {"y": tf.switch_case(index, branches)}


@tf.function(jit_compile=True)
def _compiled(x):
    return tf.nn.softmax(x) * 2


@tf.function
def with_a_compiled_part(x):
    return {"y": _compiled(x) + 1}


@tf.function
def called_many_times(x):
    return {"y": conditional(conditional(x)["y"])["y"]}


@tf.function
def dictionary_in_a_loop(x):
    _, state = tf.while_loop(
        lambda i, _: i < 3,
        lambda i, s: (i + 1, {"a": s["b"], "b": s["a"] + 1}),
        (0, {"a": x, "b": x * 2}),
    )
    return {"a": state["a"], "b": state["b"]}


@tf.function
def einsum_and_fft(x):
    z = tf.signal.fft(tf.cast(tf.einsum("i,j->ij", x, x), tf.complex64))
    return {"y": tf.math.real(z)}


@tf.function
def sets_and_strings(x):
    text = tf.strings.as_string(x, precision=1)
    joined = tf.strings.reduce_join(text, separator=",")
    return {"y": tf.strings.split([joined], ",").values}


FUNCTIONS = [
    conditional,
    counted_loop,
    loop_to_a_limit,
    nested_loops,
    mapped,
    array,
    scanned,
    switched,
    with_a_compiled_part,
    called_many_times,
    dictionary_in_a_loop,
    einsum_and_fft,
    sets_and_strings,
]


@pytest.fixture(params=FUNCTIONS, ids=lambda f: f.python_function.__name__)
def function(request):
    return request.param


@pytest.mark.parametrize(
    ("function", "inline"), crossed(FUNCTIONS, [True, False], together=1)
)
def test_functions_compute_the_same(function, inline, tmp_path):
    concrete = function.get_concrete_function(FLOATS)
    m = geutil_model.open(concrete, inline=inline)
    expected = {n: t.numpy() for n, t in concrete(tf.constant(X)).items()}
    assert_round_trip(m, tmp_path, {"x": X}, expected)
    again = geutil_model.open(tmp_path / "round_trip", inline=inline)
    assert_same(again.run(x=X), expected)
    again.save(tmp_path / "twice")
    assert_same(loaded_function(tmp_path / "twice")(x=X), expected)


def test_gradients_are_those_of_the_function(function):
    if function is sets_and_strings:
        return
    concrete = function.get_concrete_function(FLOATS)
    m = geutil_model.open(concrete)
    opened = m.to_function()

    def gradient(call):
        x = tf.constant(X)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.add_n([tf.reduce_sum(t**2) for t in call(x).values()])
        return tape.gradient(loss, x)

    np.testing.assert_allclose(gradient(opened), gradient(concrete), rtol=1e-5)
    np.testing.assert_allclose(
        tf.function(lambda: gradient(opened))(), gradient(concrete), rtol=1e-5
    )


@pytest.mark.parametrize("as_dictionary", [True, False])
def test_a_function_that_was_differentiated_is_opened(as_dictionary):
    def call(x):
        y = _compiled(tf.sin(x)) * tf.exp(x)
        return {"y": y} if as_dictionary else y

    f = tf.function(call, [FLOATS])
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = tf.nest.flatten(f(x))[0]
    tape.gradient(value, x)
    m = geutil_model.open(f)
    assert list(m.outputs) == ["y" if as_dictionary else "output_0"]
    (output,) = m.run(x=X).values()
    np.testing.assert_array_equal(output, value)


def test_a_compiled_function_stays_a_call():
    m = geutil_model.open(with_a_compiled_part.get_concrete_function(FLOATS))
    (call,) = (op for op in m.graph.get_operations() if "Call" in op.type)
    assert call.get_attr("_XlaMustCompile")
    assert [kept.node for kept in m.kept_calls] == [call.name]


def test_a_compiled_signature():
    f = tf.function(lambda x: {"y": x * 2}, [FLOATS], jit_compile=True)
    m = geutil_model.open(f)
    np.testing.assert_array_equal(m.run(x=X)["y"], X * 2)


class Counter(tf.Module):
    def __init__(self):
        super().__init__()
        self.count = tf.Variable(0, name="count", trainable=False)
        self.log = tf.Variable([0, 0], name="log", trainable=False)

    @tf.function(input_signature=[FLOATS])
    def number(self, x):
        before = self.count.read_value()
        self.count.assign_add(1)
        between = self.count.read_value()
        self.count.assign(self.count * 2)
        # Not commutative: the order shows in the value.
        self.log.assign(self.log * 10 + [1, 2])
        return {"before": before, "between": between, "x": x}


def opened_counter(way, tmp_path):
    counter = Counter()
    if way == "memory":
        return geutil_model.open(counter.number), counter.count, counter.log
    tf.saved_model.save(
        counter, str(tmp_path / "c"), {"serving_default": counter.number}
    )
    m = geutil_model.open(tmp_path / "c")
    if way == "saved again":
        m.save(tmp_path / "again")
        m = geutil_model.open(tmp_path / "again")
    return m, m.variables["count"], m.variables["log"]


@pytest.mark.parametrize("way", ["memory", "saved", "saved again"])
def test_effects_happen_once_and_in_order(way, tmp_path):
    m, count, log = opened_counter(way, tmp_path)
    for before in (0, 2, 6):
        outputs = m.run(x=X)
        assert (outputs["before"], outputs["between"]) == (before, before + 1)
        assert count.numpy() == 2 * (before + 1)
    assert log.numpy().tolist() == [111, 222]


@pytest.mark.parametrize("way", ["memory", "saved"])
def test_effects_happen_when_no_output_needs_them(way, tmp_path):
    m, count, _ = opened_counter(way, tmp_path)
    part = m.cut(outputs=["x"])
    part.run(x=X)
    del m.outputs["before"], m.outputs["between"]
    before = count.numpy()
    m.run(x=X)
    assert count.numpy() == 2 * (before + 1)


def test_effects_happen_inside_a_function():
    m, count, _ = opened_counter("memory", None)
    f = m.to_function()

    @tf.function
    def twice(x):
        f(x)
        return f(x)["before"]

    assert twice(X).numpy() == 2
    assert count.numpy() == 6


def test_an_assertion_still_fails(tmp_path):
    @tf.function(input_signature=[FLOATS])
    def f(x):
        tf.debugging.assert_positive(x, message="must be positive")
        return {"y": x * 2}

    m = geutil_model.open(f)
    m.save(tmp_path / "saved")
    for run in (m.run, loaded_function(tmp_path / "saved")):
        np.testing.assert_array_equal(run(x=[1.0])["y"], [2])
        with pytest.raises(tf.errors.InvalidArgumentError, match="must be positive"):
            run(x=[-1.0])


def test_printing_is_kept(capfd):
    @tf.function(input_signature=[FLOATS])
    def f(x):
        tf.print("seen", tf.size(x))
        return {"y": x * 2}

    geutil_model.open(f).run(x=X)
    assert capfd.readouterr().err == "seen 3\n"


def test_random_numbers_differ_from_call_to_call(tmp_path):
    f = tf.function(lambda x: {"y": x + tf.random.normal([3])}, [FLOATS])
    m = geutil_model.open(f)
    assert not np.array_equal(m.run(x=X)["y"], m.run(x=X)["y"])
    m.save(tmp_path / "saved")
    run = loaded_function(tmp_path / "saved")
    assert not np.array_equal(run(x=X)["y"], run(x=X)["y"])


def test_a_generator_moves_on():
    module = tf.Module()
    module.generator = tf.random.Generator.from_seed(3)
    module.f = tf.function(lambda x: {"y": x + module.generator.normal([3])}, [FLOATS])
    other = tf.random.Generator.from_seed(3)
    m = geutil_model.open(module.f)
    for _ in range(2):
        np.testing.assert_array_equal(m.run(x=X)["y"], X + other.normal([3]).numpy())


def test_seeded_numbers_are_the_same():
    def f(x):
        return {"y": x + tf.random.stateless_normal([3], [1, 2])}

    m = geutil_model.open(tf.function(f, [FLOATS]))
    np.testing.assert_array_equal(m.run(x=X)["y"], f(tf.constant(X))["y"])


def test_a_python_function_runs_here_and_is_not_saved(tmp_path):
    f = tf.function(
        lambda x: {"y": tf.py_function(lambda v: v * 2, [x], tf.float32)}, [FLOATS]
    )
    m = geutil_model.open(f)
    np.testing.assert_array_equal(m.run(x=X)["y"], X * 2)
    # Python code is in no file: what is written would fail wherever it is loaded.
    with pytest.raises(ModelError, match=r"EagerPyFunc.* calls a function of Python"):
        m.save(tmp_path / "saved")


def test_a_python_function_inside_a_branch_is_not_saved(tmp_path):
    def branch(x):
        return tf.numpy_function(lambda v: v * 2, [x], tf.float32)

    f = tf.function(
        lambda x: {"y": tf.cond(tf.size(x) > 1, lambda: branch(x), lambda: x)}, [FLOATS]
    )
    m = geutil_model.open(f)
    np.testing.assert_array_equal(m.run(x=X)["y"], X * 2)
    with pytest.raises(ModelError, match="calls a function of Python"):
        m.save(tmp_path / "saved")


@pytest.mark.parametrize("megabytes", [1, 80])
def test_large_captured_arrays(megabytes, tmp_path):
    values = tf.constant(np.arange(megabytes * 2**18, dtype=np.float32))
    f = tf.function(lambda x: {"y": tf.gather(values, tf.cast(x, tf.int32))}, [FLOATS])
    m = geutil_model.open(f)
    x = np.float32([0, 7, 1000])
    assert_round_trip(m, tmp_path, {"x": x}, {"y": x})


def test_a_loaded_model_inside_a_module(tmp_path):
    counter = Counter()
    tf.saved_model.save(
        counter, str(tmp_path / "inner"), {"serving_default": counter.number}
    )
    outer = tf.Module()
    outer.inner = tf.saved_model.load(str(tmp_path / "inner"))

    @tf.function(input_signature=[FLOATS])
    def serve(x):
        found = outer.inner.number(x)
        return {"y": found["x"] * 2, "count": found["between"]}

    tf.saved_model.save(outer, str(tmp_path / "outer"), {"serving_default": serve})
    m = geutil_model.open(tmp_path / "outer")
    assert "count" in m.variables
    assert m.run(x=X)["count"] == 1
    assert m.run(x=X)["count"] == 3
    m.save(tmp_path / "again")
    run = loaded_function(tmp_path / "again")
    assert run(x=X)["count"] == 7


def test_a_graph_def_with_functions():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None], "x")
        y = counted_loop(conditional(x)["y"])["y"]
        tf.identity(y, "y")
    expected = counted_loop(conditional(tf.constant(X))["y"])["y"].numpy()
    for inline in (True, False):
        m = geutil_model.open(graph.as_graph_def(), outputs=["y"], inline=inline)
        assert_same(m.run(x=X), {"y": expected})


def test_an_optimizer_step_is_a_signature(tmp_path):
    model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
    optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    spec = [tf.TensorSpec([None, 2], name="x"), tf.TensorSpec([None, 1], name="y")]

    @tf.function(input_signature=spec)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        return {"loss": loss}

    m = geutil_model.open(step)
    x = np.float32([[1, 2], [3, 4]])
    data = {"x": x, "y": x.sum(1, keepdims=True)}
    losses = [float(m.run(**data)["loss"]) for _ in range(20)]
    assert min(losses) < losses[0] / 2
    # The weights and the momentum are saved: the next steps are the same.
    m.save(tmp_path / "saved")
    run = loaded_function(tmp_path / "saved")
    after = [float(run(**data)["loss"]) for _ in range(5)]
    here = [float(m.run(**data)["loss"]) for _ in range(5)]
    np.testing.assert_allclose(after, here, rtol=1e-5)
