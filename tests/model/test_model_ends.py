"""Parts cut out of models, and models joined: they compute what the whole did."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil import model
from tests.model.body_samples import gradients
from tests.model.refusal_tables import not_refused

X = np.array([1.0, 2.0], np.float32)


@pytest.fixture
def chain():
    """Return a model: a = x * v, b = a + w, y = exp(b), z = a + u."""
    v, w, u = (
        tf.Variable(n, name=name)
        for n, name in zip((2.0, 3.0, 5.0), "vwu", strict=True)
    )
    counter = tf.Variable(0.0, name="counter")

    @tf.function(
        input_signature=[
            tf.TensorSpec([None], name="x"),
            tf.TensorSpec([None], name="other"),
        ]
    )
    def function(x, other):
        a = tf.multiply(x, v, name="a")
        counter.assign_add(tf.reduce_sum(other))
        b = tf.add(a, w, name="b")
        return {"y": tf.exp(b, name="exp"), "z": tf.add(a, u, name="sum")}

    m = model.open(function)
    m.kept_alive = (v, w, u, counter)
    return m


def test_head_and_tail_make_the_whole(chain):
    before = chain.graph.as_graph_def()
    head = chain.cut(inputs=["x"], outputs=["b"])
    tail = chain.cut(inputs=["b"], outputs=["b", "y"])
    ge.verify(tail.graph)
    assert chain.graph.as_graph_def() == before
    whole = chain.run(x=X, other=X)
    b = head.run(x=X)["b"]
    np.testing.assert_array_equal(b, X * 2 + 3)
    results = tail.run(b=b)
    # An output may be an input.
    assert list(results) == ["b", "y"]
    np.testing.assert_array_equal(results["b"], b)
    np.testing.assert_array_equal(results["y"], whole["y"])
    # An input keeps shape and dtype, and takes the name of the op that is cut off.
    spec = tail.inputs["b"]
    assert (spec.op.name, spec.op.type) == ("b", "Placeholder")
    assert (spec.shape.as_list(), spec.dtype) == ([None], tf.float32)


def test_a_part_has_the_variables_that_it_needs(chain):
    chain.run(x=X, other=X)
    assert set(chain.variables) == {"v", "w", "u", "counter"}
    assert set(chain.cut(inputs=["x"], outputs=["b"]).variables) == {"v", "w"}
    assert set(chain.cut(inputs=["b"], outputs=["y"]).variables) == set()
    part = chain.cut(inputs=["x"], outputs=["z"])
    assert set(part.variables) == {"v", "u"}
    part.variables["v"].assign(10.0)
    assert chain.run(x=X, other=X)["z"][0] == 15.0


def test_a_part_is_alone_and_has_the_inputs_that_it_needs(chain):
    part = chain.cut(outputs=["y"])
    assert list(part.signatures) == ["serving_default"]
    assert (list(part.inputs), list(part.outputs)) == (["x"], ["y"])


def test_side_effects_of_the_part_are_kept(chain):
    before = float(chain.variables["counter"])
    chain.cut(inputs=["x", "other"], outputs=["y"]).run(x=X, other=X)
    assert float(chain.variables["counter"]) == before + 3.0
    part = chain.cut(inputs=["x"], outputs=["y"])
    part.run(x=X)
    assert "counter" not in part.variables
    assert float(chain.variables["counter"]) == before + 3.0


def test_ends_can_be_tensors_ops_and_mappings(chain):
    a = chain.graph.get_tensor_by_name("a:0")
    for selection, name in ((a, "a"), (a.op, "a"), ({"new": a}, "new"), (["a:0"], "a")):
        part = chain.cut(inputs=selection, outputs=["y"])
        assert list(part.inputs) == [name]
        np.testing.assert_allclose(part.run(**{name: X})["y"], np.exp(X + 3), 1e-6)


def test_a_stray_placeholder_can_be_cut_off(chain):
    with chain.graph.as_default():
        stray = tf.compat.v1.placeholder(tf.float32, [], "stray")
        chain.outputs["y"] = chain.outputs["y"] + stray
    part = chain.cut(inputs=["x", "stray"], outputs=["y"])
    np.testing.assert_allclose(part.run(x=X, stray=1.0)["y"], np.exp(X * 2 + 3) + 1)


def test_refusals(chain):
    cases = [
        (message, partial(chain.cut, *ends), message)
        for *ends, message in (
            (["b"], ["y", "z"], r"still depend on its input 'x'.*inputs="),
            ({"same": "x"}, {"y": 3}, r"expected a tensor"),
            (["a", "a:0"], ["y"], r"two tensors would be called 'a'"),
            (["x"], ["EXP"], r"'EXP'; similar are \['exp'\]"),
            (["x"], ["smu"], r"'smu'; similar are \['sum_1'"),
        )
    ]
    assert not_refused(model.ModelError, cases, unchanged=chain) == {}


def test_tensors_of_another_model_and_ops_with_several_outputs_are_refused(chain):
    other = chain.cut(outputs=["y"])
    with pytest.raises(model.ModelError, match=r"another graph"):
        chain.cut(inputs=[other.inputs["x"]])
    with chain.graph.as_default():
        op = tf.raw_ops.Split(axis=0, value=chain.inputs["x"], num_split=2)[0].op
    with pytest.raises(model.ModelError, match=r"2 outputs; pass a tensor such as"):
        chain.cut(outputs=[op])


SPEC = tf.TensorSpec([None], name="x")
MATRIX = tf.TensorSpec([None, 3], name="x")


def opened(body, *specs):
    m = model.open(tf.function(body, list(specs or (SPEC,))))
    m.keep = body
    return m


@pytest.fixture
def first():
    w = tf.Variable(2.0, name="w")

    def body(x):
        hidden = tf.multiply(x, w, name="hidden")
        return {"y": tf.add(hidden, 1.0, name="sum")}

    m = opened(body)
    m.keep = w
    return m


@pytest.fixture
def second():
    w = tf.Variable(10.0, name="w")
    m = opened(lambda x: {"z": tf.multiply(x, w, name="hidden")})
    m.keep = w
    return m


def hidden_of(m):
    return m.graph.get_tensor_by_name("hidden:0")


def keeping_hidden(m):
    m.outputs["hidden"] = hidden_of(m)
    return m


# How two models are joined, and what comes of an x.
JOINS = {
    "append": (lambda a, b: a.append(b), {"z": (X * 2 + 1) * 10}),
    "append, what is not read is kept": (
        lambda a, b: keeping_hidden(a).append(b, {"x": "hidden"}),
        {"y": X * 2 + 1, "z": X * 20},
    ),
    "prepend": (lambda a, b: a.prepend(b), {"y": X * 20 + 1}),
    "a tensor in the middle is replaced": (
        lambda a, b: a.splice(b, {"hidden": "z"}, {"x": "x"}),
        {"y": X * 10 + 1},
    ),
    "behind a tensor the original is read": (
        lambda a, b: a.splice(b, {"hidden": "z"}, {"x": "hidden"}),
        {"y": X * 20 + 1},
    ),
    "tensors as such": (
        lambda a, b: a.splice(
            b, [(hidden_of(a), b.outputs["z"])], {"x": a.inputs["x"]}
        ),
        {"y": X * 10 + 1},
    ),
    "a reference to a tensor": (
        lambda a, b: a.splice(b, {hidden_of(a).ref(): "z"}, {"x": a.inputs["x"]}),
        {"y": X * 10 + 1},
    ),
    "inputs that nothing feeds": (
        lambda a, b: a.splice(b, {"hidden": "z"}),
        {"y": X * 10 + 1},
    ),
}


@pytest.mark.parametrize("name", JOINS)
def test_joins(name, first, second):
    join, expected = JOINS[name]
    both = join(first, second)
    ge.verify(both.graph)
    assert list(both.inputs) == ["x"]
    assert list(both.outputs) == list(expected)
    assert set(both.variables) == {"w", "w_1"}
    for end, value in both.run(x=X).items():
        np.testing.assert_array_equal(value, expected[end])


def test_an_input_that_nothing_feeds_becomes_another(first, second):
    both = keeping_hidden(first).splice(second, {"sum": "z"})
    assert list(both.inputs) == ["x", "x_1"]
    result = both.run(x=X, x_1=X * 2)
    np.testing.assert_array_equal(result["y"], X * 20)
    np.testing.assert_array_equal(result["hidden"], X * 2)


def test_names_are_kept_apart(first):
    def body(x):
        return {"z": tf.multiply(x, tf.exp(x, name="two"), name="hidden")}

    second = opened(body)
    # Names are in inputs, in control inputs and in colocations.
    z = second.outputs["z"].op
    ge.add_control_inputs(z, second.graph.get_operation_by_name("two"))
    z._set_attr("_class", tf.compat.v1.AttrValue(list={"s": [b"loc:@two"]}))
    both = first.splice(second, {"hidden": "z"}, {"x": "x"}, scope="mine")
    names = [op.name for op in both.graph.get_operations()]
    assert {"mine/hidden", "sum"} <= set(names)
    assert len(names) == len(set(names))
    joined = both.graph.get_operation_by_name("mine/hidden")
    assert [op.name for op in joined.control_inputs] == ["mine/two"]
    assert joined.colocation_groups() == [b"loc:@mine/two"]


def test_names_that_do_not_clash_stay(first):
    spec = tf.TensorSpec([None], name="v")
    other = opened(lambda v: {"z": tf.exp(v, name="two")}, spec)
    names = {op.name for op in first.append(other).graph.get_operations()}
    assert {"x", "hidden", "sum", "two"} <= names


def test_a_model_can_be_joined_to_itself(first):
    twice = first.append(first)
    np.testing.assert_array_equal(twice.run(x=X)["y"], (X * 2 + 1) * 2 + 1)
    assert list(twice.variables) == ["w"]
    twice.variables["w"].assign(0.0)
    assert twice.run(x=X)["y"].tolist() == [1.0, 1.0]


def test_both_models_are_differentiable(first, second):
    f = first.append(second).to_function()
    variables = [first.variables["w"], second.variables["w"]]
    _, *found = gradients(lambda x: f(x)["z"], X, variables)
    np.testing.assert_allclose(found, [(X * 10).sum(), (X * 2 + 1).sum()])


def test_custom_gradients_of_both_survive():
    @tf.custom_gradient
    def odd(x):
        y = tf.square(x)
        return y, lambda g: g * y * 7.0

    m = opened(lambda x: {"y": odd(x)})
    f = m.append(m).to_function()
    (slope,) = gradients(lambda x: f(x)["y"], [2.0], [])
    # odd'(v) = 7 v^2, at v = 4 and v = 2.
    assert slope.numpy().tolist() == [7 * 16 * 7 * 4]


def test_shapes_are_inferred_anew():
    fixed = opened(lambda x: {"y": tf.negative(x)}, tf.TensorSpec([None, 2], name="x"))
    narrow = opened(lambda x: {"y": tf.exp(x)}, tf.TensorSpec([3, 2], name="x"))
    both = fixed.prepend(narrow)
    assert both.outputs["y"].shape.as_list() == [3, 2]
    other = narrow.prepend(fixed)
    assert other.outputs["y"].shape.as_list() == [None, 2]
    assert other.run(x=np.ones((5, 2), np.float32))["y"].shape == (5, 2)


def test_functions_of_the_same_name_are_kept_apart(tmp_path):
    files = []
    for number, factor in enumerate((2.0, 3.0)):
        with tf.Graph().as_default() as graph:
            x = tf.compat.v1.placeholder(tf.float32, [], "x")
            (end,) = tf.while_loop(lambda v: v < 100.0, lambda v, f=factor: v * f, [x])
            tf.identity(end, name="y")
        graph_def = graph.as_graph_def()
        for function in graph_def.library.function:
            kind = "body" if "body" in function.signature.name else "cond"
            _rename(graph_def, function.signature.name, kind)
        files.append(tmp_path / f"{number}.pb")
        files[-1].write_bytes(graph_def.SerializeToString())
    one, two = (model.open(file, outputs=["y"]) for file in files)
    assert float(one.run(x=3.0)["y"]) == 192.0
    assert float(two.run(x=3.0)["y"]) == 243.0
    both = one.splice(two, {}, {"x": "x"})
    result = both.run(x=3.0)
    assert [float(v) for v in result.values()] == [192.0, 243.0]


def _rename(graph_def, old, new):
    for function in graph_def.library.function:
        if function.signature.name == old:
            function.signature.name = new
    for node in graph_def.node:
        for value in node.attr.values():
            if value.func.name == old:
                value.func.name = new


def test_cycles_dtypes_shapes_and_unknown_ends_are_refused(first, second):
    ints = opened(lambda x: {"z": tf.cast(x, tf.int32)})
    wide = opened(lambda x: {"z": tf.expand_dims(x, 0)})
    table = (
        (second, {"hidden": "z"}, {"x": "y"}, r"depend on each other.*hidden"),
        (ints, {"hidden": "z"}, {"x": "x"}, r"int32.*float32.*tf.cast"),
        (wide, {"hidden": "z"}, {"x": "x"}, r"of shape \(1, None\).*\(None,\)"),
        (second, {"hidden": "nothing"}, {}, r"no output 'nothing'.*\['z'\]"),
        (second, {"nothing": "z"}, {}, r"no .*tensor, op, layer or scope 'nothing'"),
        (second, {"hidden": "z"}, {"nothing": "x"}, r"no input 'nothing'.*\['x'\]"),
    )
    cases = [(said, partial(first.splice, *ends), said) for *ends, said in table]
    assert not_refused(model.ModelError, cases, unchanged=first) == {}


def test_ends_that_cannot_be_paired_are_refused():
    two = opened(lambda x: {"a": x, "b": x})
    other = opened(
        lambda c, d: {"e": c + d},
        tf.TensorSpec([None], name="c"),
        tf.TensorSpec([None], name="d"),
    )
    with pytest.raises(model.ModelError, match=r"no name in common; pass inputs="):
        two.append(other)
    assert two.append(other, {"c": "a", "d": "b"}).run(x=X)["e"].tolist() == [2.0, 4.0]


def loaded(path, signature="serving_default", **inputs):
    """Return what TensorFlow makes of a signature of a SavedModel."""
    signatures = tf.saved_model.load(str(path)).signatures
    return signatures[signature](**{n: tf.constant(v) for n, v in inputs.items()})


def saved_floats(path):
    """Return how many numbers the variables of a SavedModel hold in its file."""
    reader = tf.train.load_checkpoint(str(path / "variables/variables"))
    shapes = reader.get_variable_to_shape_map().items()
    return sum(np.prod(shape) for name, shape in shapes if "VARIABLE_VALUE" in name)


# How two models stand side by side, and what comes of an x and of another input.
SIDES = {
    "inputs of their own": (lambda a, b: a.join(b), "x x_1", "y z", (1, 10)),
    "a common input": (lambda a, b: a.join(b, "x"), "x", "y z", (1, 1)),
    "common by another name": (
        lambda a, b: a.join(b.rename({"x": "v"}), {"v": "x"}),
        "x",
        "y z",
        (1, 1),
    ),
    "names that clash": (
        lambda a, b: a.join(b.rename(outputs={"z": "y"})),
        "x x_1",
        "y y_1",
        (1, 10),
    ),
    "itself": (lambda a, b: a.join(a), "x x_1", "y y_1", (1, 10)),
    "itself, of the same input": (lambda a, b: a.join(a, ["x"]), "x", "y y_1", (1, 1)),
    "itself, renamed": (
        lambda a, b: a.join(a.rename({"x": "right"}, {"y": "of_right"})),
        "x right",
        "y of_right",
        (1, 10),
    ),
}


def test_models_stand_side_by_side(first, second, tmp_path, caplog):
    """Next to the two by themselves, as they are and as a SavedModel."""
    wrong = {}
    for name, (join, inputs, outputs, factors) in SIDES.items():
        caplog.clear()
        both = join(first, second)
        ge.verify(both.graph)
        ends = (list(both.inputs), list(both.outputs))
        others = first if "itself" in name else second
        names = {"w"} if others is first else {"w", "w_1"}
        trained = both.to_function().trainable_variables
        if ends != (inputs.split(), outputs.split()) or set(both.variables) != names:
            wrong[name] = (ends, both.variables)
        if len(trained) != len(names):
            wrong[name, "trained"] = trained
        told = [end for end in ("x_1", "y_1") if f"is called '{end}'" in caplog.text]
        if told != [end for end in ("x_1", "y_1") if end in (*ends[0], *ends[1])]:
            wrong[name, "told"] = caplog.text
        values = [X * factor for factor in factors]
        expected = [m.run(x=v) for m, v in zip((first, others), values, strict=True)]
        path = both.save(tmp_path / name)
        if saved_floats(path) != len(names):
            wrong[name, "saved"] = saved_floats(path)
        fed = dict(zip(ends[0], values, strict=False))
        for found in (both.run(**fed), loaded(path, **fed)):
            for end, of_one in zip(ends[1], expected, strict=True):
                if not np.array_equal(found[end], next(iter(of_one.values()))):
                    wrong[name, end] = (found[end], of_one)
    assert wrong == {}


def tower():
    """A network with what joining has to keep apart: a loop, a norm, a function."""
    tf.keras.utils.set_random_seed(1)
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input([6, 4], name="series"),
            layers.Conv1D(8, 3),
            layers.BatchNormalization(),
            layers.GRU(5),
            layers.Dense(3, activation="softmax", name="scores"),
        ],
        name="tower",
    )


def test_a_network_is_applied_twice(tmp_path):
    """A siamese network: what is shared is there once, and both sides train it."""
    net = tower()
    sides = np.random.default_rng(0).normal(size=(2, 5, 6, 4)).astype(np.float32)
    fed = dict(zip(("series", "other"), sides, strict=True))
    weights = [v.value for v in net.trainable_weights]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((net(sides[0]) - net(sides[1])) ** 2)
    slopes = tape.gradient(loss, weights)
    m = model.open(net, inline=False)
    expected = [m.run(series=side)["scores"] for side in sides]
    twice = m.join(m.rename({"series": "other"}, {"scores": "of_other"}))
    assert list(twice.variables) == list(m.variables)
    np.testing.assert_array_equal(list(twice.run(**fed).values()), expected)
    f = twice.to_function()
    assert len(f.trainable_variables) == len(weights)
    with tf.GradientTape() as tape:
        one, other = f(**fed).values()
        loss = tf.reduce_sum((one - other) ** 2)
    for found, slope in zip(tape.gradient(loss, weights), slopes, strict=True):
        np.testing.assert_allclose(found, slope, rtol=1e-4, atol=1e-6)
    path = twice.save(tmp_path / "twice")
    assert saved_floats(path) == saved_floats(m.save(tmp_path / "once"))
    values = loaded(path, **fed)
    for name, value in zip(("scores", "of_other"), expected, strict=True):
        np.testing.assert_allclose(values[name], value, rtol=1e-5, atol=1e-6)


def test_constants_of_a_model_that_is_applied_twice_are_there_once():
    weights = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)
    m = opened(lambda x: {"y": x @ tf.constant(weights, name="w")}, MATRIX)
    for both in (m.join(m), m.append(m), m.join(m.rename({"x": "v"}))):
        kinds = [op.type for op in both.graph.get_operations()]
        assert kinds.count("Const") == 1 and kinds.count("MatMul") == 2
    values = m.join(m).run(x=weights, x_1=2 * weights)
    expected = [weights @ weights, 2 * weights @ weights]
    np.testing.assert_allclose(list(values.values()), expected, rtol=1e-5)
    other = opened(lambda x: {"y": x @ tf.constant(-weights, name="w")}, MATRIX)
    different = m.join(other, "x").run(x=weights)
    np.testing.assert_array_equal(different["y"], -different["y_1"])


def test_a_common_input_has_a_shape_that_both_take():
    rows = opened(lambda x: {"y": x + 1.0}, tf.TensorSpec([None, 3], name="x"))
    four = opened(
        lambda x: {"z": tf.reshape(x, [12])}, tf.TensorSpec([4, None], name="x")
    )
    both = rows.join(four, "x")
    assert both.inputs["x"].shape == both.outputs["y"].shape == [4, 3]
    assert rows.inputs["x"].shape[0] is None
    values = both.run(x=np.ones([4, 3], np.float32))
    assert values["y"].shape == (4, 3) and values["z"].shape == (12,)


def test_what_cannot_stand_side_by_side_is_refused(first, second):
    ints = opened(lambda v: {"z": v}, tf.TensorSpec([None], tf.int32, name="v"))
    square = opened(lambda v: {"z": v}, tf.TensorSpec([2, 2], name="v"))
    pair = opened(
        lambda a, b: {"z": a},
        *(tf.TensorSpec([n], name=s) for n, s in ((2, "a"), (3, "b"))),
    )
    table = (
        (ints, {"v": "x"}, r"int32.*tf.cast"),
        (square, {"v": "x"}, r"of shape \(2, 2\)"),
        (pair, {"a": "x", "b": "x"}, r"of shape \(2,\) and of shape \(3,\).*'b.*apart"),
        (second, ["v"], r"no input 'v'.*\['x'\]"),
        (second, {"x": "y"}, r"no input 'y'"),
        (first.graph, (), r"cannot join a"),
    )
    cases = [(said, partial(first.join, *given), said) for *given, said in table]
    assert not_refused(model.ModelError, cases, unchanged=first) == {}


# How a model gets another signature beside its own, and what comes of an x there.
BESIDE = {
    "prepend": (lambda a, b, s: a.prepend(b, signature=s), {"y": X * 20 + 1}),
    "append": (lambda a, b, s: a.append(b, signature=s), {"z": (X * 2 + 1) * 10}),
    "splice": (
        lambda a, b, s: a.splice(b, {"hidden": "z"}, {"x": "x"}, signature=s),
        {"y": X * 10 + 1},
    ),
    "join": (
        lambda a, b, s: a.join(b, "x", signature=s),
        {"y": X * 2 + 1, "z": X * 10},
    ),
    "cut": (lambda a, b, s: a.cut(outputs="hidden", signature=s), {"hidden": X * 2}),
}


def test_a_new_signature_stands_beside_the_old_ones(first, second, tmp_path):
    wrong = {}
    for name, (change, expected) in BESIDE.items():
        both = change(first, second, "new")
        weights = 1 if name == "cut" else 2
        path = both.save(tmp_path / name)
        if list(both.signatures) != ["serving_default", "new"] or (
            saved_floats(path) != weights or both.signature != "new"
        ):
            wrong[name] = (both.signatures, both.signature, saved_floats(path))
        again = model.open(path, signature="new")
        found = [both.run(x=X), loaded(path, "new", x=X), again.run(x=X)]
        old = [m.signatures["serving_default"].run(x=X) for m in (both, again)]
        for values in found:
            if any(not np.array_equal(values[e], v) for e, v in expected.items()):
                wrong[name, "new"] = values
        for values in (*old, loaded(path, x=X)):
            if not np.array_equal(values["y"], X * 2 + 1):
                wrong[name, "old"] = values
        # Without a name the result takes the old one's place.
        if list(change(first, second, None).signatures) != ["serving_default"]:
            wrong[name, "replaced"] = change(first, second, None).signatures
    assert wrong == {}
    # The old ones stay as they are edited, and nobody takes their names.
    first.outputs["y"] = hidden_of(first)
    third = both.rename(signature="second").append(
        second, {"x": "hidden"}, signature="third"
    )
    path = third.save(tmp_path / "third")
    assert list(third.signatures) == ["serving_default", "second", "third"]
    np.testing.assert_array_equal(loaded(path, x=X)["y"], X * 2)
    np.testing.assert_array_equal(loaded(path, "third", x=X)["z"], X * 20)
    said = {"third": "there is a signature 'third' already", "": "needs a name"}
    cases = [
        (name, partial(change, third, second, name), message)
        for name, message in said.items()
        for change in (
            lambda a, b, s: a.join(b, signature=s),
            lambda a, b, s: a.cut(signature=s),
        )
    ]
    assert not_refused(model.ModelError, cases, unchanged=third) == {}
