"""Models with control flow, effects, random numbers, and functions that stay calls."""

import numpy as np
import pytest
import tensorflow as tf

from geutil import model as geutil_model
from geutil.model import ModelError
from tests.model.body_samples import gradients, slopes
from tests.model.round_trips import assert_round_trip, assert_same, loaded_function

FLOATS = tf.TensorSpec([None], name="x")
X = np.float32([1, -2, 3])


@tf.function
def conditional(x):
    y = x - 1
    if tf.reduce_sum(x) > 0:
        y = x * 2
    return {"y": y}


@tf.function
def loop_to_a_limit(x):
    while tf.reduce_max(tf.abs(x)) < 100.0:
        x = x * 3
    return {"y": x}


@tf.function
def array(x):
    rows = tf.TensorArray(tf.float32, size=0, dynamic_size=True)
    for i in tf.range(tf.size(x)):
        rows = rows.write(i, x[i] * tf.cast(i, tf.float32))
    return {"y": rows.stack()}


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
def sets_and_strings(x):
    text = tf.strings.as_string(x, precision=1)
    joined = tf.strings.reduce_join(text, separator=",")
    return {"y": tf.strings.split([joined], ",").values}


FUNCTIONS = {
    f.python_function.__name__: f
    for f in (
        conditional,
        loop_to_a_limit,
        array,
        switched,
        with_a_compiled_part,
        called_many_times,
        sets_and_strings,
    )
}


def all_of_them():
    """Return a function that calls each with its own input; outputs are named by it."""

    @tf.function
    def call(**inputs):
        return {
            f"{name}_{end}": value
            for name, f in FUNCTIONS.items()
            for end, value in f(inputs[name]).items()
        }

    return call.get_concrete_function(
        **{name: tf.TensorSpec([None], name=name) for name in FUNCTIONS}
    )


@pytest.mark.parametrize("inline", [True, False])
def test_functions_compute_the_same(inline, tmp_path):
    concrete, inputs = all_of_them(), dict.fromkeys(FUNCTIONS, X)
    m = geutil_model.open(concrete, inline=inline)
    values = concrete(**{n: tf.constant(x) for n, x in inputs.items()})
    expected = {n: t.numpy() for n, t in values.items()}
    assert_round_trip(m, tmp_path, inputs, expected)
    again = geutil_model.open(tmp_path / "round_trip", inline=inline)
    assert_same(again.run(**inputs), expected)


def test_gradients_are_those_of_the_function():
    concrete = all_of_them()
    opened = geutil_model.open(concrete).to_function()
    inputs = dict.fromkeys(FUNCTIONS, X)
    expected = slopes(concrete, inputs)
    assert set(FUNCTIONS) - set(expected) == {"sets_and_strings"}
    for found in (
        slopes(opened, inputs),
        tf.function(slopes, autograph=False)(opened, inputs),
    ):
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("as_dictionary", [True, False])
def test_a_function_that_was_differentiated_is_opened(as_dictionary):
    def call(x):
        y = _compiled(tf.sin(x)) * tf.exp(x)
        return {"y": y} if as_dictionary else y

    f = tf.function(call, [FLOATS])
    gradients(lambda x: tf.nest.flatten(f(x))[0], X, [])
    m = geutil_model.open(f)
    assert list(m.outputs) == ["y" if as_dictionary else "output_0"]
    (output,) = m.run(x=X).values()
    np.testing.assert_array_equal(output, tf.nest.flatten(f(X))[0])


def test_a_compiled_function_stays_a_call():
    m = geutil_model.open(with_a_compiled_part.get_concrete_function(FLOATS))
    (call,) = (op for op in m.graph.get_operations() if "Call" in op.type)
    assert call.get_attr("_XlaMustCompile")
    assert [kept.node for kept in m.kept_calls] == [call.name]
    f = tf.function(lambda x: {"y": x * 2}, [FLOATS], jit_compile=True)
    np.testing.assert_array_equal(geutil_model.open(f).run(x=X)["y"], X * 2)


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
    geutil_model.open(tmp_path / "c").save(tmp_path / "again")
    m = geutil_model.open(tmp_path / "again")
    return m, m.variables["count"], m.variables["log"]


@pytest.mark.parametrize("way", ["memory", "saved again"])
def test_effects_happen_once_and_in_order(way, tmp_path):
    m, count, log = opened_counter(way, tmp_path)
    for before in (0, 2, 6):
        outputs = m.run(x=X)
        assert (outputs["before"], outputs["between"]) == (before, before + 1)
        assert count.numpy() == 2 * (before + 1)
    assert log.numpy().tolist() == [111, 222]


def test_effects_happen_inside_a_function_and_when_no_output_needs_them():
    m, count, _ = opened_counter("memory", None)
    f = m.to_function()

    @tf.function
    def twice(x):
        f(x)
        return f(x)["before"]

    assert twice(X).numpy() == 2
    assert count.numpy() == 6
    part = m.cut(outputs=["x"])
    part.run(x=X)
    del m.outputs["before"], m.outputs["between"]
    before = count.numpy()
    m.run(x=X)
    assert count.numpy() == 2 * (before + 1)


def test_an_assertion_still_fails_and_printing_is_kept(tmp_path, capfd):
    @tf.function(input_signature=[FLOATS])
    def f(x):
        tf.debugging.assert_positive(x, message="must be positive")
        tf.print("seen", tf.size(x))
        return {"y": x * 2}

    m = geutil_model.open(f)
    m.save(tmp_path / "saved")
    for run in (m.run, loaded_function(tmp_path / "saved")):
        capfd.readouterr()
        np.testing.assert_array_equal(run(x=[1.0])["y"], [2])
        assert capfd.readouterr().err == "seen 1\n"
        with pytest.raises(tf.errors.InvalidArgumentError, match="must be positive"):
            run(x=[-1.0])


def test_random_numbers(tmp_path):
    def f(x):
        return {
            "random": x + tf.random.normal([3]),
            "generated": x + module.generator.normal([3]),
            "seeded": x + tf.random.stateless_normal([3], [1, 2]),
        }

    module = tf.Module()
    module.generator = tf.random.Generator.from_seed(3)
    module.f = tf.function(f, [FLOATS])
    other = tf.random.Generator.from_seed(3)
    m = geutil_model.open(module.f)
    m.save(tmp_path / "saved")
    first, second = m.run(x=X), m.run(x=X)
    assert not np.array_equal(first["random"], second["random"])
    # What is saved has the generator's state of then.
    loaded = loaded_function(tmp_path / "saved")
    again = [loaded(x=X), loaded(x=X)]
    assert not np.array_equal(again[0]["random"], again[1]["random"])
    for result, saved in zip((first, second), again, strict=True):
        expected = X + other.normal([3]).numpy()
        np.testing.assert_array_equal(result["generated"], expected)
        np.testing.assert_array_equal(saved["generated"], expected)
        np.testing.assert_array_equal(result["seeded"], f(tf.constant(X))["seeded"])


def test_python_functions_run_here_and_are_not_saved(tmp_path):
    def branch(x):
        return tf.numpy_function(lambda v: v * 2, [x], tf.float32)

    calls = {
        r"EagerPyFunc.* calls a function of Python": lambda x: tf.py_function(
            lambda v: v * 2, [x], tf.float32
        ),
        "calls a function of Python": lambda x: tf.cond(
            tf.size(x) > 1, lambda: branch(x), lambda: x
        ),
    }
    for message, call in calls.items():
        m = geutil_model.open(tf.function(lambda x: {"y": call(x)}, [FLOATS]))  # noqa: B023
        np.testing.assert_array_equal(m.run(x=X)["y"], X * 2)
        # Python code is in no file: what is written would fail wherever it is loaded.
        with pytest.raises(ModelError, match=message):
            m.save(tmp_path / "saved")


def test_large_captured_arrays(tmp_path, monkeypatch):
    values = tf.constant(np.arange(2**18, dtype=np.float32))
    f = tf.function(lambda x: {"y": tf.gather(values, tf.cast(x, tf.int32))}, [FLOATS])
    x = np.float32([0, 7, 1000])
    for limit in (2**20, 2**10):
        monkeypatch.setattr("geutil.model.sources.objects.CONSTANT_LIMIT", limit)
        m, folder = geutil_model.open(f), tmp_path / str(limit)
        folder.mkdir()
        assert_round_trip(m, folder, {"x": x}, {"y": x})


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


def test_an_optimizer_step_is_a_signature(tmp_path):
    model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
    optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    spec = [tf.TensorSpec([None, 2], name="x"), tf.TensorSpec([None, 1], name="y")]

    @tf.function(input_signature=spec)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        slopes = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(slopes, model.trainable_variables, strict=True))
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
