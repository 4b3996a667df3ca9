"""Checkpointed functions have the gradients of plain ones, wherever they are called."""

import gc
import weakref
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from geutil.errors import ArgumentTypeError, SelectionError
from geutil.gradients import by_type, checkpointed, gradients
from tests.gradients.checking import deep, run
from tests.gradients.wrapped.comparing import assert_same, dense
from tests.thorough import crossed

OPTIONS = {
    "inputs": {"checkpoints": "inputs"},
    "memory": {},
    "speed": {"checkpoints": "speed", "min_checkpoint_size": 0},
    "policy": {"checkpoints": by_type("Tanh"), "min_checkpoint_size": 0},
}
X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
WEIGHTS = np.random.default_rng(1).normal(size=(4, 8, 8)).astype(np.float32) / 3


@pytest.fixture
def weights():
    return [tf.Variable(w) for w in WEIGHTS]


def chain(weights):
    def function(x):
        for w in weights:
            x = tf.sin(tf.tanh(x @ w))
        return x

    return function


# AutoGraph converts "function" and "outside" of `PLACES`.
as_function = partial(tf.function, autograph=False)


def gradients_of(function, weights, persistent=False):
    """Return a function from x to the gradients by x and the weights."""

    def step(x):
        with tf.GradientTape(persistent=persistent) as tape:
            tape.watch(x)
            loss = tf.reduce_sum(function(x) ** 2)
        found = tape.gradient(loss, [x, *weights])
        return [found, tape.gradient(loss, weights[:2])] if persistent else found

    return step


def while_loop(function):
    def looped(x):
        return tf.while_loop(
            lambda i, _: i < 3, lambda i, x: (i + 1, function(x)), (tf.constant(0), x)
        )[1]

    return looped


def branch(function):
    return lambda x: tf.cond(tf.reduce_sum(x) < 1e9, lambda: function(x), lambda: x)


def switch(function):
    return lambda x: tf.switch_case(
        tf.cast(x[0, 0] < 1e9, tf.int32), [lambda: x, lambda: function(x)]
    )


def twice(function):
    return lambda x: function(function(x)) + function(x)


def in_tf_gradients(function, weights):
    return as_function(
        lambda x: tf.gradients(tf.reduce_sum(function(x) ** 2), [x, *weights])
    )


def through_a_closure(function, weights):
    return lambda x: gradients_of(as_function(lambda _: function(x)), weights)(x)


def second_order(function, weights):
    def step(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(function(x) ** 2)
            slope = tf.reduce_sum(inner.gradient(loss, x) ** 2)
        return outer.gradient(slope, [x, *weights])

    return step


def jit(function):
    return as_function(function, jit_compile=True)


PLACES = {
    "eager": gradients_of,
    "function": lambda f, w: tf.function(gradients_of(f, w)),
    "xla": lambda f, w: jit(gradients_of(f, w)),
    "outside": lambda f, w: gradients_of(tf.function(f), w),
    "outside_xla": lambda f, w: gradients_of(jit(f), w),
    "persistent": lambda f, w: as_function(gradients_of(f, w, True)),
    "persistent_eager": lambda f, w: gradients_of(f, w, True),
    "twice": lambda f, w: as_function(gradients_of(twice(f), w)),
    "while": lambda f, w: as_function(gradients_of(while_loop(f), w)),
    "while_outside": lambda f, w: gradients_of(as_function(while_loop(f)), w),
    "cond": lambda f, w: as_function(gradients_of(branch(f), w)),
    "switch": lambda f, w: as_function(gradients_of(switch(f), w)),
    "tf_gradients": in_tf_gradients,
    "closure": through_a_closure,
}


@pytest.mark.parametrize(("options", "place"), crossed(OPTIONS, PLACES, together=1))
def test_gradients_are_the_plain_ones(place, options, weights):
    plain = chain(weights)
    x = tf.constant(X)
    found = PLACES[place](checkpointed(plain, **OPTIONS[options]), weights)(x)
    assert_same(found, PLACES[place](plain, weights)(x))


# Rounding grows with each order.
@pytest.mark.parametrize("traced", [False, True])
def test_second_order(traced, weights):
    plain = chain(weights)

    def run(function):
        step = second_order(function, weights)
        return (as_function(step) if traced else step)(tf.constant(X))

    assert_same(run(checkpointed(plain, "inputs")), run(plain), 4e-6)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("place", ["eager", "function", "outside", "while"])
def test_bit_for_bit_with_op_determinism(place, weights):
    plain, x = chain(weights), tf.constant(X)
    found = PLACES[place](checkpointed(plain, "inputs"), weights)(x)
    # Eagerly the reference runs op by op, without Grappler.
    reference = "outside" if place == "eager" else place
    assert_same(found, PLACES[reference](plain, weights)(x), 0)


def graph_of(function, weights):
    step = as_function(gradients_of(function, weights))
    return step.get_concrete_function(tf.constant(X)).graph


def test_it_recomputes_and_its_graph_dies(weights):
    graph = graph_of(checkpointed(chain(weights), "inputs"), weights)
    again = [op for op in graph.get_operations() if op.name.startswith("recomputed/")]
    types = [op.type for op in again]
    assert types.count("MatMul") == len(weights)
    assert types.count("Sin") == len(weights) - 1  # No gradient reads the last one.
    dead = weakref.ref(graph)
    del graph, again
    gc.collect()
    assert dead() is None


def test_a_call_waits_for_all_that_the_call_before_it_holds(weights):
    first, second = (checkpointed(chain([w, w]), "inputs") for w in weights[:2])
    graph = graph_of(lambda x: second(tf.sin(first(x))), weights[:2])
    gates = [op for op in graph.get_operations() if "recomputed/gate" in op.name]
    *_, last = sorted(gates, key=lambda op: int(op.name.partition("_")[2] or 0))
    awaited = [op.type for op in last.control_inputs]
    # The gradient of a weight, besides what flows on to the call.
    assert "Identity" in awaited
    assert {"MatMul", "AddN"} & set(awaited)


def test_structures_keywords_and_what_is_no_tensor(weights):
    def plain(inputs, scale=1.0, *, names, nothing=None):
        a, (b, index) = inputs["a"], inputs["rest"]
        assert names == ["p", "q"]
        assert nothing is None
        picked = tf.gather(a, index) @ weights[0]
        return {
            "sum": (scale * tf.sin(picked) + b, None),
            "index": index + 1,
            "text": tf.strings.as_string(index),
            "flag": "python",
        }

    def run(function):
        def step(a, b, index):
            with tf.GradientTape() as tape:
                tape.watch([a, b])
                result = function(
                    {"a": a, "rest": (b, index)}, 2.0, names=["p", "q"], nothing=None
                )
                loss = tf.reduce_sum(tf.sin(result["sum"][0]))
            gradients = tape.gradient(loss, [a, b, weights[0], weights[1]])
            assert result["sum"][1] is None
            assert result["flag"] == "python"
            return dense(gradients), result["index"], result["text"]

        return step

    args = (tf.constant(X), tf.constant(X[:2]), tf.constant([3, 1]))
    for wrap in (lambda f: f, tf.function):
        expected, *others = wrap(run(plain))(*args)
        found, *found_others = wrap(run(checkpointed(plain, "inputs")))(*args)
        assert expected[3] is None
        assert_same(found, expected)
        for a, b in zip(found_others, others, strict=True):
            assert (a.numpy() == b.numpy()).all()


def test_sparse_gradients_stay_sparse():
    table = tf.Variable(WEIGHTS[0])

    @tf.function
    def step(function, index):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(function(index))
        gradient = tape.gradient(loss, table)
        assert isinstance(gradient, tf.IndexedSlices)
        return tf.convert_to_tensor(gradient)

    def plain(index):
        return tf.sin(tf.tanh(tf.nn.embedding_lookup(table, index)))

    index = tf.constant([1, 3, 1])
    assert_same(step(checkpointed(plain, "inputs"), index), step(plain, index))


def by_tape(ys_of, xs, sources, **options):
    with tf.GradientTape() as tape:
        tape.watch(xs)
        y = ys_of()
    return tape.gradient(y, sources, **options)


def by_graph(ys_of, xs, sources, **options):
    del xs
    return tf.gradients(ys_of(), sources, **options)


@pytest.mark.parametrize("differentiate", [by_tape, by_graph])
@pytest.mark.parametrize("size", [3, 1000])
def test_outputs_that_nothing_reads_have_no_part(differentiate, size):
    """TensorFlow makes zeros for them, by ops that depend on sizes and on variables."""
    v, unread = tf.Variable(tf.fill([size], 2.0)), tf.Variable(tf.ones([size]))

    def plain(x, w):
        return tf.math.log(x), 2.0 * x * v, tf.tanh(tf.tanh(w)) * unread

    def second(function, x, w):
        return function(x, w)[1]

    def branched(function, x, w):
        return tf.cond(tf.reduce_sum(x) > 1, lambda: x, partial(second, function, x, w))

    def found(function, place, signature, unconnected):
        missing = []

        @tf.function(autograph=False, input_signature=[signature] * 2)
        def step(x, w):
            slopes = differentiate(
                partial(place, function, x, w),
                [x, w],
                [x, w, v, unread],
                unconnected_gradients=unconnected,
            )
            missing[:] = [slope is None for slope in slopes]
            return [slope for slope in slopes if slope is not None]

        slopes = step(tf.zeros([size]), tf.ones([size]))
        return missing, [slope.numpy().tolist() for slope in slopes]

    function = checkpointed(plain, "inputs")
    for shape in ([size], [None]):
        for place in (second, branched):
            for unconnected in ("none", "zero"):
                case = place, tf.TensorSpec(shape), unconnected
                missing, slopes = found(function, *case)
                assert (missing, slopes) == found(plain, *case)
                # The logarithm's would be infinite.
                assert slopes[0] == [4.0] * size
                assert missing == [False, unconnected == "none"] * 2


def test_what_nothing_reads_has_no_gradient_beside_one_of_slices():
    function = checkpointed(lambda x, w: (deep(x), deep(w)), "inputs")

    @tf.function(autograph=False)
    def step(x, w):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y, _ = function(x, w)
            # To make a tensor of its gradient takes ops.
            loss = tf.reduce_sum(tf.gather(y, [0, 2]))
        gradient, none = tape.gradient(loss, [x, w])
        assert none is None
        return gradient

    assert np.any(step(tf.ones([4, 2]), tf.ones([3])))


def test_variables_made_in_the_first_call_and_state():
    class Module(tf.Module):
        def __init__(self):
            super().__init__()
            self.w = None

        def __call__(self, x):
            if self.w is None:
                self.w = tf.Variable(WEIGHTS[0])
                self.seen = tf.Variable(0.0, trainable=False)
            self.seen.assign_add(1.0)
            return tf.sin(tf.tanh(x @ self.w)) * self.seen

    def run(wrap, around):
        module = Module()
        function = wrap(module)

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(function(x) ** 2)
            return tape.gradient(loss, [module.w, module.seen])

        step = around(step)
        gradients = [step(tf.constant(X)) for _ in range(3)]
        assert module.seen.numpy() == 3
        return gradients

    for around in (lambda f: f, tf.function):
        expected = run(lambda f: f, around)
        assert_same(run(lambda f: checkpointed(f, "inputs"), around), expected)


@pytest.mark.parametrize("traced", [False, True])
def test_what_acts_acts_once(traced, weights):
    calls = []

    def count(x):
        calls.append(1)
        return x

    generator = tf.random.Generator.from_seed(7)
    masks = []

    @checkpointed
    def function(x):
        x = tf.numpy_function(count, [tf.sin(x @ weights[0])], tf.float32)
        x = tf.ensure_shape(x, [4, 8])
        mask = generator.uniform([4, 8])
        masks.append(mask)
        return tf.stop_gradient(x) * tf.sin(mask * tf.tanh(X @ weights[1])), mask

    def step(x):
        with tf.GradientTape() as tape:
            y, mask = function(x)
            loss = tf.reduce_sum(y)
        return tape.gradient(loss, weights[1]), y, mask

    run = as_function(step) if traced else step
    before = generator.state.numpy()
    found, _, mask = run(tf.constant(X))
    assert len(calls) == 1
    once = tf.random.Generator.from_state(before, "philox")
    assert (once.uniform([4, 8]).numpy() == mask.numpy()).all()
    assert (generator.state.numpy() == once.state.numpy()).all()
    with tf.GradientTape() as tape:
        x = tf.sin(X @ weights[0])
        loss = tf.reduce_sum(x * tf.sin(mask * tf.tanh(X @ weights[1])))
    assert_same(found, tape.gradient(loss, weights[1]))


def assert_as_plain(found, plain, weights):
    for place in ("eager", "xla"):
        ours = PLACES[place](found, weights)(tf.constant(X))
        assert_same(ours, PLACES[place](plain, weights)(tf.constant(X)))


def test_nested_calls_are_one(weights):
    first, rest = chain(weights[:2]), chain(weights[2:])
    inner = checkpointed(first, "inputs")
    outer = checkpointed(lambda x: rest(inner(inner(x))), "inputs")
    assert_as_plain(outer, lambda x: rest(first(first(x))), weights)


def test_it_works_within_other_gradients(weights):
    """Calls are part of a step that is checkpointed as a whole."""
    inner = checkpointed(chain(weights[:2]), "inputs")

    @tf.function
    def step(function, x, **options):
        y = tf.sin(chain(weights[2:])(function(tf.tanh(x))))
        maker = gradients if options else tf.gradients
        return maker(tf.reduce_sum(y), [x, *weights], **options)

    x = tf.constant(X)
    found = step(inner, x, checkpoints=by_type("Sin"), min_checkpoint_size=0)
    assert_same(found, step(chain(weights[:2]), x))


def test_loops_and_branches_inside(weights):
    def plain(x):
        y = tf.tanh(x @ weights[0])
        y = tf.while_loop(
            lambda i, _: i < 2,
            lambda i, y: (i + 1, tf.sin(y @ weights[1])),
            (tf.constant(0), y),
            maximum_iterations=2,
        )[1]
        y = tf.cond(tf.reduce_sum(y) < 1e9, lambda: tf.sin(y), lambda: y)
        return tf.sin(as_function(lambda y: tf.tanh(y @ weights[2]))(y))

    assert_as_plain(checkpointed(plain, "inputs"), plain, weights)


def test_shapes_that_are_computed_under_xla(weights):
    def plain(x):
        for w in weights:
            y = tf.tanh(x @ w)
            y = tf.sin(tf.reshape(y, [2 * tf.shape(y)[0], -1]))
            x = tf.sin(tf.reshape(y, tf.shape(x)))
        return x

    def run(function):
        step = gradients_of(function, weights)
        signature = [tf.TensorSpec([None, 8])]
        return tf.function(step, signature, jit_compile=True)(tf.constant(X))

    wrapped = checkpointed(plain, by_type("MatMul"), min_checkpoint_size=0)
    assert_same(run(wrapped), run(plain))


def test_autograph_goes_on_where_it_would(weights):
    def plain(x):
        y = tf.tanh(x @ weights[0])
        if tf.reduce_sum(x) < 1e9:
            y = tf.sin(y)
        for _ in tf.range(2):
            y = tf.sin(y)
        return y

    expected = gradients_of(plain, weights)(tf.constant(X))
    wrapped = checkpointed(plain, "inputs")
    for step in (
        gradients_of(wrapped, weights),
        tf.function(gradients_of(wrapped, weights)),
        gradients_of(tf.function(wrapped), weights),
    ):
        assert_same(step(tf.constant(X)), expected)

    @tf.function(autograph=False)
    def unconverted(x):
        return wrapped(x)

    with pytest.raises(TypeError, match="symbolic"):
        unconverted(tf.constant(X))


def test_methods_and_signatures(weights):
    class Thing:
        @checkpointed
        def method(self, x, power=2):
            """Say."""
            return tf.sin(x @ weights[0]) ** power

    thing = Thing()
    assert Thing.method.__doc__ == "Say."
    assert Thing.method.__name__ == "method"
    x = tf.constant(X)
    found = gradients_of(lambda x: thing.method(x, power=3), weights)(x)
    expected = gradients_of(lambda x: tf.sin(x @ weights[0]) ** 3, weights)(x)
    assert_same(found, expected)


def test_version_1_graph(graph):
    w = tf.compat.v1.get_variable("w", initializer=WEIGHTS[0], use_resource=True)
    x, plain = tf.constant(X), chain([w, w])
    functions = plain, checkpointed(plain, "inputs")
    both = [tf.gradients(tf.reduce_sum(f(x)), [x, w]) for f in functions]
    expected, found = run(graph, both, optimize=True)
    assert_same(found, expected)


def test_without_a_tape_nothing_is_traced():
    runs = []

    @checkpointed
    def function(x):
        runs.append(tf.executing_eagerly())
        return tf.sin(x)

    for _ in range(2):
        function(tf.constant(1.0))
    assert runs == [True, True]


def test_refusals():
    for fn, options, error, words in [
        (3, {}, ArgumentTypeError, "Keras layer"),
        (tf.sin, {"checkpoints": "best"}, SelectionError, "inputs, memory"),
        (tf.sin, {"checkpoints": [1]}, ArgumentTypeError, "policy"),
        (tf.sin, {"checkpoints": None}, ArgumentTypeError, "policy"),
        (tf.sin, {"min_checkpoint_size": -1}, ArgumentTypeError, "min_checkpoint"),
        (tf.sin, {"offload": 3}, ArgumentTypeError, "offload"),
    ]:
        with pytest.raises(error, match=words):
            checkpointed(fn, **options)
