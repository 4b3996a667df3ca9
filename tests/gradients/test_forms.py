"""Everything that `tf.gradients` takes, in graphs and inside `tf.function`."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from geutil.gradients import gradients, gradients_collection, gradients_speed
from geutil.gradients import last_report as report
from tests.gradients.checking import assert_close, flat, forms, run, unlike
from tests.settings import needs_eager

v1 = tf.compat.v1


def network(x, *weights):
    """Return the layers of a small network; each weight is a [4, 4] matrix."""
    layers = [x]
    for w in weights:
        layers.append(tf.tanh(tf.matmul(layers[-1], w)))
        layers.append(tf.sin(layers[-1]))
    return layers


def start():
    return tf.constant(np.linspace(-1, 1, 8).reshape(2, 4), tf.float32)


def weight(number):
    return np.cos(np.arange(16.0) * number).reshape(4, 4).astype(np.float32)


def by_complex(function, layers, **options):
    z = tf.tanh(tf.exp(tf.sin(tf.complex(layers[-1], layers[2]))))
    return function(z, layers[:3], tf.ones_like(z), **options)


BODIES = {
    "one y, one x": lambda f, t, **o: f(t[-1], t[0], **o),
    "lists": lambda f, t, **o: f([t[-1], t[3]], [t[0], t[2]], **o),
    "tuples": lambda f, t, **o: f((t[-1],), (t[0],), **o),
    "one y twice": lambda f, t, **o: f([t[-1], t[-1]], t[0], **o),
    "one x twice": lambda f, t, **o: f(t[-1], [t[0], t[0]], **o),
    "y among xs": lambda f, t, **o: f(t[-1], [t[-1], t[0]], **o),
    "a gradient": lambda f, t, **o: f(t[-1], t[0], tf.ones_like(t[-1]) * 3.0, **o),
    "gradients": lambda f, t, **o: f([t[-1], t[2]], t[0], [None, t[2] * 2.0], **o),
    "a forward tensor as gradient": lambda f, t, **o: f(t[-1], t[0], t[3], **o),
    "slices as gradient": lambda f, t, **o: f(
        t[-1], t[0], [tf.IndexedSlices(t[-1][:1], tf.constant([1]), [2, 4])], **o
    ),
    "stopped": lambda f, t, **o: f(
        [t[-1], t[2] * t[2]], t[0], stop_gradients=t[3], **o
    ),
    "unreachable": lambda f, t, **o: f(t[-1], [tf.zeros([3]), t[0]], **o),
    "unreachable as zero": lambda f, t, **o: f(
        t[-1], [tf.zeros([3]), t[0]], unconnected_gradients="zero", **o
    ),
    "zero by its enum": lambda f, t, **o: f(
        t[-1],
        [tf.zeros([3]), t[0]],
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
        **o,
    ),
    "gated": lambda f, t, **o: f(t[-1] * t[3], t[0], gate_gradients=True, **o),
    "a name": lambda f, t, **o: f(t[-1], t[0], name="mine", **o),
    "a half precision y": lambda f, t, **o: f(tf.cast(t[-1], tf.float16), t[0], **o),
    "an integer y": lambda f, t, **o: f(tf.cast(t[-1], tf.int32), t[0], **o),
    "complex tensors": by_complex,
}


def test_arguments(setting):
    counts, wrong = {}, {}

    def build():
        values = []
        for name, body in BODIES.items():
            layers = network(start(), *map(tf.constant, map(weight, (1, 2, 3))))
            plain = body(tf.gradients, layers)
            kept = [layers[2], layers[4]]
            ours = body(gradients, layers, checkpoints=kept, min_checkpoint_size=0)
            assert isinstance(ours, list)
            is_none = forms(ours) == ["none"]
            if forms(ours) != forms(plain) or is_none != (name == "an integer y"):
                wrong[name] = forms(ours)
            if not report().recomputed and name not in ("stopped", "an integer y"):
                wrong[name] = report()
            if name != "gated":
                taped = body(gradients, layers, checkpoints=None, engine="tape")
                if forms(taped) != forms(plain):
                    wrong[f"{name}, taped"] = forms(taped)
                ours += taped
            counts[name] = len(flat(plain)), len(flat(ours))
            values += flat(plain) + flat(ours)
        return values

    values = iter(setting.run(build))
    assert wrong == {}
    plain, ours = {}, {}
    for name, (count, of_all) in counts.items():
        plain[name] = [next(values) for _ in range(count)]
        plain[name] *= of_all // (count or 1)
        ours[name] = [next(values) for _ in range(of_all)]
    assert unlike(ours, plain) == {}


def test_the_order_of_arguments_is_that_of_tensorflow(setting):
    def build():
        layers = network(start(), tf.constant(weight(1)))
        arguments = (layers[-1], [layers[0], tf.zeros([3])], None, "mine", True, 2)
        plain = tf.gradients(*arguments, layers[1], "zero")
        ours = gradients_speed(*arguments, layers[1], "zero")
        return flat(plain) + flat(ours)

    values = setting.run(build)
    assert_close(values[2:], values[:2])


def test_arguments_beyond_those_of_tensorflow():
    with pytest.raises(TypeError, match="by position"):
        gradients_speed(*range(9))


def check_variables(build_variables, run_it):
    """Check gradients by variables, and that some recompute."""

    def build():
        *variables, aside = build_variables()
        # The first one is read twice.
        read = map(tf.convert_to_tensor, [*variables, variables[0]])
        layers = network(start(), *read)
        tensors = [getattr(v, "value", v) for v in variables]
        tensors = [
            t if isinstance(t, tf.Variable) else v
            for t, v in zip(tensors, variables, strict=True)
        ]
        plain = tf.gradients(layers[-1], tensors)
        by_list = gradients(layers[-1], variables, checkpoints=[layers[2]])
        by_tuple = gradients(layers[-1], tuple(variables), checkpoints=[layers[2]])
        alone = gradients(layers[-1], variables[0], checkpoints=[layers[2]])
        assert report().recomputed
        taped = partial(gradients, checkpoints=None, engine="tape")
        *by_tape, none = taped(layers[-1], [*variables, aside])
        assert none is None
        zero = taped(layers[-1], aside, unconnected_gradients="zero")
        return plain + by_list + by_tuple + by_tape + alone + zero

    values = run_it(build)
    expected = [*3 * values[:2], values[0], np.zeros([4, 4])]
    assert_close(values[2:], expected)


@needs_eager
@pytest.mark.parametrize("kind", [tf.Variable, keras.Variable])
def test_variables_in_a_function(kind):
    variables = [kind(weight(number)) for number in (1, 2, 3)]
    check_variables(lambda: variables, lambda build: tf.function(build)())


@pytest.mark.parametrize("resource", [False, True])
def test_version_1_variables(resource):
    def build_variables():
        return [
            v1.get_variable(f"v{i}", initializer=weight(i), use_resource=resource)
            for i in (1, 2, 3)
        ]

    def run_it(build):
        with tf.Graph().as_default() as graph:
            return run(graph, build(), optimize=True)

    check_variables(build_variables, run_it)


@needs_eager
def test_a_variable_as_y():
    v = tf.Variable([1.0, 2.0])

    @tf.function
    def take():
        return gradients([v, v * v], v, checkpoints=[v.read_value()])

    np.testing.assert_array_equal(take()[0], [3.0, 5.0])


def test_the_collection(setting):
    made = []

    def build():
        layers = network(start(), *map(tf.constant, map(weight, (1, 2, 3))))
        v1.add_to_collection("checkpoints", layers[2])
        v1.add_to_collection("checkpoints", layers[4])
        plain = tf.gradients(layers[-1], layers[0])
        ours = gradients(layers[-1], layers[0])
        also = gradients_collection(layers[-1], layers[0])
        made.append(report())
        reasons = {t.name: t.reason for t in report().kept}
        assert reasons[layers[2].name] == "chosen: collection"
        return plain + ours + also

    values = setting.run(build)
    assert_close(values[1:], values[:1] * 2)
    assert made[0].recomputed
