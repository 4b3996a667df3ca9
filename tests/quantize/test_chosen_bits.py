"""Bits chosen under a budget, against every choice, and against files."""

import itertools
import json
import sys

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from geutil import model
from geutil.errors import ArgumentTypeError, MissingExtraError, QuantizeError
from geutil.quantize import (
    BitPlan,
    Spec,
    calibrate,
    choose_bits,
    quantize,
    to_int8,
    to_tflite,
)
from geutil.quantize.bit_plans import SwitchedNetwork, find_weights
from geutil.quantize.bit_search import least_noise, least_size
from tests.quantize.converted import both_results, opened, spec, stored_weights
from tests.quantize.converted import decibels as signal_to_noise
from tests.quantize.small_networks import normal
from tests.settings import needs_eager
from tests.thorough import chosen, examples, some

pytestmark = needs_eager

_PER_BUFFER = 16
"""Bytes that a buffer may be moved by, to begin at a multiple of them."""


def every_kind(x):
    """Layers of every kind that int8 kernels compute; most wide, some shared."""
    y = tf.nn.relu(tf.nn.conv2d(x, normal(3, 3, 4, 8, seed=1), 1, "SAME", name="conv"))
    y = tf.nn.conv2d(y, 0.2 * normal(3, 3, 4, 8, seed=2), 1, "SAME", name="grouped")
    y = tf.nn.conv2d(
        y, 0.1 * normal(3, 3, 8, 8, seed=3), 1, "SAME", dilations=2, name="dilated"
    )
    y = tf.nn.depthwise_conv2d(
        y, 0.4 * normal(3, 3, 8, 2, seed=4), [1, 1, 1, 1], "SAME", name="depthwise"
    )
    y = tf.nn.conv2d_transpose(
        y, 0.2 * normal(2, 2, 8, 16, seed=5), [1, 8, 8, 8], 2, "SAME", name="up"
    )
    y = tf.reshape(y, [1, 64, 8])
    y = tf.einsum("abc,cd->abd", y, normal(8, 8, seed=6), name="einsum")
    y = tf.einsum("abc,dc->abd", y, 0.3 * normal(8, 8, seed=7), name="turned")
    y = tf.einsum("abc,cnd->abnd", y, 0.3 * normal(8, 2, 4, seed=8), name="heads")
    y = tf.reshape(y, [1, 64, 8])
    y = tf.matmul(y, 0.3 * normal(1, 8, 8, seed=9), name="batches")
    y = tf.reshape(tf.matmul(y, 0.3 * normal(8, 6, seed=10), name="flat"), [64, 6])
    y = tf.matmul(y, normal(4, 6, seed=11), transpose_b=True, name="transposed")
    return {"y": tf.matmul(y, normal(4, 5, seed=12), name="last")}


BYTES_ONLY = {"depthwise", "grouped", "up", "batches"}
"""Layers of `every_kind` whose int8 kernels read no weights of 4 bits."""
COLUMNS = {"einsum/Einsum": 8, "flat": 6, "last": 5}
"""Its matrices that have a range for each column, and how many."""
TOLD = 288 + 288 + 576 + 144 + 512 + 64 + 64 + 64 + 64 + 48 + 24 + 20
"""The number of its weights."""


@pytest.fixture(scope="module")
def kinds():
    m = opened(every_kind, spec(1, 4, 4, 4, name="x"))
    return m, [{"x": normal(1, 4, 4, 4, seed=20 + i)} for i in range(2)]


def chain(x):
    """Five dense layers, some of which tell more of what comes out than others."""
    for index, width in enumerate((24, 16, 32, 8)):
        weights = normal(x.shape[-1], width, seed=index)
        weights *= np.float32(np.exp(normal(width, seed=50 + index)))
        bias = tf.constant(normal(width, seed=30 + index))
        x = tf.nn.relu(tf.matmul(x, weights, name=f"dense{index}") + bias)
    return {"y": tf.matmul(x, normal(8, 6, seed=9), name="last")}


@pytest.fixture(scope="module")
def dense():
    m = opened(chain, spec(None, 12, name="x"))
    return m, [{"x": normal(32, 12, seed=60 + i)} for i in range(3)]


def results(m, data):
    return np.concatenate([next(iter(m.run(**sample).values())) for sample in data])


def decibels(m, quantized, data):
    """Return the signal to noise of a model, run as it is."""
    return signal_to_noise(*(results(each, data) for each in (m, quantized)))


def assembled(m, data, overrides, scheme="int8", method="min_max"):
    copy = m.cut()
    quantize(copy, scheme=scheme, is_training=False, overrides=overrides)
    if scheme == "int8":
        calibrate(copy, data, method, rounding="nearest")
    return copy


def stored(blob):
    """Return the bytes that a file has of the weights of layers."""
    kinds = ("CONV", "FULLY_CONNECTED", "BATCH_MATMUL")
    weights = stored_weights(blob)
    read = (t.buffer for kind, t in weights if any(k in kind for k in kinds))
    return sum(buffer.size for buffer in {id(b): b for b in read}.values())


SIZES = [
    ("int8", 0.75),
    ("int8", 0.85),
    ("weight_only_int8", 0.6),
    ("weight_only_int8", 1.5),
]


@pytest.mark.parametrize("case", chosen(SIZES, SIZES[0], SIZES[3]), ids=str)
def test_files_have_the_size_and_the_noise_that_are_told(kinds, case):
    """To the byte in their weights, and to a few for each buffer in the whole.

    The network has no biases, which a file stores in steps of their own.
    """
    scheme, share = case
    m, data = kinds
    budget = int(share * TOLD)
    plan = choose_bits(m, data, size=budget, scheme=scheme, method="min_max")
    assert (len(plan.layers), plan.left) == (12, ())
    assert plan.int8_size == TOLD
    assert 0.95 * share * TOLD <= plan.size <= share * TOLD
    assert len({layer.bits for layer in plan.layers}) > 1
    models = [assembled(m, data, each, scheme) for each in ({}, plan.overrides)]
    assert plan.decibels == pytest.approx(decibels(m, models[1], data), abs=0.01)
    files = [to_tflite(each, scheme=scheme) for each in models]
    assert [stored(blob) for blob in files] == [plan.int8_size, plan.size]
    # A matrix of 16 bits has one range, and not one of 12 bytes for each column.
    fewer = sum(
        12 * (COLUMNS.get(layer.ops[0], 1) - 1)
        for layer in plan.layers
        if layer.bits > 8
    )
    saved = len(files[0]) - len(files[1]) - fewer
    slack = _PER_BUFFER * len(plan.layers)
    assert saved == pytest.approx(plan.int8_size - plan.size, abs=slack)
    if scheme == "int8":
        _, found = both_results(models[1], files[1], data)["y"]
        measured = signal_to_noise(results(m, data), found)
        assert plan.decibels == pytest.approx(measured, abs=0.3)


@pytest.mark.parametrize("bits", chosen([2, 3, 4, 5, 8], 4, 5))
def test_what_each_number_of_bits_takes(kinds, bits):
    m, data = kinds
    copy = m.cut()
    layers, _ = find_weights(copy, quantize(copy, is_training=False))
    told = {layer.ops[0]: layer.stored_bytes(bits, "int8") for layer in layers}
    for layer in layers:
        name = layer.ops[0].partition("/")[0]
        is_half = bits <= 4 and name not in BYTES_ONLY
        assert told[layer.ops[0]] == layer.count // (2 if is_half else 1), name
    blob = to_int8(assembled(m, data, {".": Spec(weight_bits=bits)}))
    assert stored(blob) == sum(told.values())


@pytest.fixture(scope="module")
def every_choice(dense):
    """Each choice of 4 and 8 bits for the dense layers: its bytes and its dB.

    Of the network that is switched, which plans show to be what quantize assembles.
    """
    m, data = dense
    copy = m.cut()
    report = quantize(copy, is_training=False)
    calibrate(copy, data, "min_max", rounding="nearest")
    layers, _ = find_weights(copy, report)
    counts = (12 * 24, 24 * 16, 16 * 32, 32 * 8, 8 * 6)
    names = [(f"dense{i}",) for i in range(4)]
    assert [layer.ops for layer in layers] == [*names, ("last",)]
    samples = [{"x": tf.constant(sample["x"])} for sample in data]
    network = SwitchedNetwork(copy, layers, (4, 8), samples)
    found = {}
    for bits in itertools.product((4, 8), repeat=5):
        size = sum(n * each // 8 for n, each in zip(counts, bits, strict=True))
        noise = network.noise_of(network.outputs(bits))
        found[bits] = size, -10 * np.log10(noise)
    return found


@pytest.mark.parametrize("share", some([0.55, 0.6, 0.7, 0.8, 0.9], 2))
def test_no_choice_of_a_size_has_less_noise(dense, every_choice, share):
    m, data = dense
    plan = choose_bits(m, data, size=share, method="min_max")
    budget = share * sum((12 * 24, 24 * 16, 16 * 32, 32 * 8, 8 * 6))
    best = max(db for size, db in every_choice.values() if size <= budget)
    size, _ = every_choice[tuple(layer.bits for layer in plan.layers)]
    measured = decibels(m, assembled(m, data, plan.overrides), data)
    assert plan.size == size <= budget
    assert plan.decibels == pytest.approx(measured, abs=0.01)
    assert measured >= best - 0.02


@pytest.mark.parametrize("wanted", some([18.0, 22.0, 26.0], 2))
def test_no_choice_of_a_noise_is_smaller(dense, every_choice, wanted):
    m, data = dense
    plan = choose_bits(m, data, noise=wanted, method="min_max")
    least = min(size for size, db in every_choice.values() if db >= wanted)
    size, measured = every_choice[tuple(layer.bits for layer in plan.layers)]
    assert measured >= wanted
    assert plan.decibels >= wanted
    assert plan.size == size == least


def test_a_metric_is_kept(dense):
    """A metric that the data's largest outputs decide on."""
    m, data = dense
    labels = [m.run(**sample)["y"].argmax(-1) for sample in data]

    def agreement(outputs, index):
        return float((outputs["y"].argmax(-1) == labels[index]).mean())

    plans = [
        choose_bits(m, data, accuracy=(agreement, loss), method="min_max")
        for loss in (0.02, 0.2)
    ]
    assert plans[0].size > plans[1].size
    # The smallest that there is loses more.
    smallest = {".": Spec(weight_bits=4)}
    kept = [
        np.mean([agreement(copy.run(**s), i) for i, s in enumerate(data)])
        for overrides in (plans[0].overrides, plans[1].overrides, smallest)
        for copy in [assembled(m, data, overrides)]
    ]
    for plan, loss, measured in zip(plans, (0.02, 0.2), kept, strict=False):
        assert plan.scores == pytest.approx((1.0, measured))
        assert measured >= 1.0 - loss
    assert kept[2] < 1.0 - 0.02


def test_the_plan_says_what_was_measured(dense):
    m, data = dense
    plan = choose_bits(m, data, size=0.7, bits=(2, 4, 8), method="min_max", batches=2)
    assert (plan.batches, plan.method, plan.scheme) == (2, "min_max", "int8")
    seen = data[:2]
    eight = assembled(m, data, {})
    assert plan.int8_noise == pytest.approx(
        10 ** (-decibels(m, eight, seen) / 10), rel=1e-3
    )
    assert all([o.bits for o in la.options] == [2, 4, 8] for la in plan.layers)
    for layer in plan.layers[1::4]:
        (op,) = layer.ops
        for option in layer.options:
            alone = m.cut()
            # Weights alone, in the graph that leaves activations in float.
            quantize(
                alone,
                scheme="weight_only_int8",
                is_training=False,
                overrides={f"^{op}$": Spec(weight_bits=option.bits), ".": "skip"},
            )
            expected = 10 ** (-decibels(m, alone, seen) / 10)
            assert option.alone == pytest.approx(expected, rel=1e-3)
            together = assembled(m, data, {f"^{op}$": Spec(weight_bits=option.bits)})
            expected = 10 ** (-decibels(m, together, seen) / 10)
            assert option.together == pytest.approx(expected, rel=1e-3)
    added = sum(layer.chosen.together - plan.int8_noise for layer in plan.layers)
    assert plan.predicted == pytest.approx(plan.int8_noise + added)
    # Of as many bytes 2 bits are no choice.
    assert {layer.bits for layer in plan.layers} == {4, 8}


def test_the_same_call_chooses_the_same_and_the_curve_falls(dense):
    m, data = dense
    before = m.graph.as_graph_def().SerializeToString(deterministic=True)
    plan = choose_bits(m, data, size=0.7, method="min_max")
    assert m.graph.as_graph_def().SerializeToString(deterministic=True) == before
    # Of data that are gone through once; and a number of numpy is a number.
    again = choose_bits(m, iter(data), size=np.int64(1041), method="min_max")
    assert (again.layers, again.curve) == (plan.layers, plan.curve)
    sizes = [point.size for point in plan.curve]
    assert sizes == sorted(set(sizes))
    assert len(sizes) > 4
    noises = [point.noise for point in plan.curve]
    assert noises == sorted(noises, reverse=True)
    assert (plan.size, plan.noise) == pytest.approx(
        next((p.size, p.noise) for p in plan.curve if p.size == plan.size), rel=1e-4
    )


def test_16_bits_are_stored_where_activations_are_in_float(dense):
    m, data = dense
    eight = choose_bits(m, data, size=1.0, scheme="weight_only_int8")
    plan = choose_bits(m, data, noise=60.0, scheme="weight_only_int8")
    assert eight.decibels < 60.0 <= plan.decibels
    assert 16 in {layer.bits for layer in plan.layers}
    assert plan.size > plan.int8_size
    assert plan.method == ""
    copy = assembled(m, data, plan.overrides, plan.scheme)
    pair = both_results(copy, to_tflite(copy, scheme=plan.scheme), data)["y"]
    np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-4)


SHARED = ("product", "constant", "turned", "conv")


def thrice(x):
    """Parts of three layers that read the same variable, and of another one."""
    return {"y": tf.add_n([part_of_three(x, n, kind) for n, kind in enumerate(SHARED)])}


def part_of_three(x, seed, kind):
    sizes = [3, 3, 8, 8] if kind == "conv" else [8, 8]
    value = normal(*sizes, seed=seed) * np.float32(0.3)
    if kind not in VARIABLES:
        VARIABLES[kind] = tf.Variable(value)
    shared = tf.constant(value) if kind == "constant" else VARIABLES[kind]

    def product(x, name):
        if kind == "conv":
            return tf.nn.conv2d(x, shared, 1, "SAME", name=name)
        is_turned = kind == "turned" and name == "second"
        return tf.matmul(x, shared, transpose_b=is_turned, name=name)

    with tf.name_scope(kind):
        y = tf.reshape(x, [1, 2, 2, 8]) if kind == "conv" else x
        y = tf.nn.relu(product(y, "first"))
        y = tf.nn.relu(product(product(y, "second"), "third"))
        return tf.matmul(
            tf.reshape(y, [4, 8]), normal(8, 16, seed=9 + seed), name="last"
        )


VARIABLES: dict[str, tf.Variable] = {}


@pytest.mark.parametrize(("scheme", "bits"), [("int8", 4), ("weight_only_int8", 8)])
def test_layers_that_share_a_variable_have_equal_bits(scheme, bits):
    m = opened(thrice, spec(4, 8, name="x"))
    data = [{"x": normal(4, 8, seed=i)} for i in range(2)]
    plan = choose_bits(m, data, noise=10.0, scheme=scheme, method="min_max")
    assert {layer.ops for layer in plan.layers} == {
        tuple(f"{kind}/{name}" for name in names)
        for kind in SHARED
        for names in (("first", "second", "third"), ("last",))
    }
    copy = assembled(m, data, plan.overrides, scheme)
    assert plan.decibels == pytest.approx(decibels(m, copy, data), abs=0.01)
    overrides = dict.fromkeys(plan.overrides, Spec(weight_bits=bits))
    blob = to_tflite(assembled(m, data, overrides, scheme), scheme=scheme)
    options = [layer.options[bits // 8] for layer in plan.layers]
    assert [option.bits for option in options] == [bits] * 8
    assert stored(blob) == sum(option.size for option in options)


def test_layers_without_kernels_and_bodies_that_may_hold_some_are_told():
    """A layer with a norm behind it is one like others."""
    norm = [tf.Variable(normal(2, seed=n) ** 2 + 0.1) for n in range(4)]

    def network(x):
        y = tf.nn.conv3d(x, normal(2, 2, 2, 2, 3), [1] * 5, "SAME", name="deep")
        y = tf.matmul(tf.reshape(y, [1, 192]), normal(192, 8), name="flat")
        y = tf.reshape(y, [1, 2, 2, 2])
        y = tf.nn.conv2d(y, normal(1, 1, 2, 2), 1, "SAME", name="normed")
        y = tf.reshape(tf.nn.batch_normalization(y, *norm, 1e-3), [1, 8])
        weights = normal(8, 8, seed=2)

        def step(index, y):
            return index + 1, tf.ensure_shape(tf.matmul(y, weights), [1, 8])

        return {"y": tf.while_loop(lambda index, _: index < 2, step, [0, y])[1]}

    m = opened(network, spec(1, 4, 4, 4, 2, name="x"))
    plan = choose_bits(m, {"x": normal(1, 4, 4, 4, 2)}, size=0.5)
    assert [layer.ops for layer in plan.layers] == [("flat",), ("normed",)]
    reasons = dict(plan.left)
    assert reasons["deep"]
    assert f"left in float: deep: {reasons.pop('deep')}" in str(plan)
    ((name, reason),) = reasons.items()
    assert m.graph.get_operation_by_name(name).type == "StatelessWhile"
    assert "bodies that are not looked into" in reason


@pytest.mark.usefixtures("control_flow_v1")
def test_layers_in_branches_of_version_1_are_switched_too():
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [4, 8], "x")
        y = v1.cond(
            tf.reduce_sum(x) > 0,
            lambda: tf.matmul(x, normal(8, 8, seed=1), name="taken"),
            lambda: 2.0 * x,
        )
        tf.matmul(tf.reshape(y, [4, 8]), normal(8, 4, seed=3), name="last")
    m = model.open(graph.as_graph_def(), inputs=["x:0"], outputs=["last:0"])
    (name,) = m.inputs
    data = [{name: normal(4, 8, seed=i) + (-1) ** i} for i in range(4)]
    plan = choose_bits(m, data, size=0.8, method="min_max")
    assert {layer.ops for layer in plan.layers} == {("cond/taken",), ("last",)}
    expected = decibels(m, assembled(m, data, plan.overrides), data)
    assert plan.decibels == pytest.approx(expected, abs=0.01)
    (taken,) = (la for la in plan.layers if la.ops == ("cond/taken",))
    assert taken.options[0].alone > 100 * taken.options[1].alone > 0


@pytest.fixture(scope="module")
def named():
    """A model of small layers, of whose names one may be taken for a pattern."""

    def network(x):
        y = tf.nn.relu(tf.matmul(x, normal(8, 8, seed=1), name="a.b"))
        y = tf.nn.relu(tf.matmul(y, normal(8, 8, seed=2), name="aXb"))
        return {"y": tf.matmul(y, normal(8, 8, seed=3), name="a.b_1")}

    return opened(network, spec(None, 8, name="x")), [{"x": normal(16, 8)}]


def test_a_plan_is_saved_and_read(named, tmp_path):
    """One of a metric, whose batches count by their samples."""
    m, _ = named
    data = [{"x": normal(30, 8, seed=60)}, {"x": normal(10, 8, seed=61)}]
    plan = choose_bits(m, data, accuracy=(lambda _, index: [1.0, 0.0][index], 0.0))
    assert plan.scores == (0.75, 0.75)
    path = plan.save(tmp_path / "plan.json")
    assert BitPlan.load(path) == plan
    assert BitPlan.load(path).overrides == plan.overrides
    with pytest.raises(QuantizeError, match=r"plan.json' exists; pass overwrite"):
        plan.save(path)
    assert plan.save(path, overwrite=True) == path
    assert "Infinity" not in path.read_text()
    assert "NaN" not in path.read_text()
    content = json.loads(path.read_text())
    content["layers"][0]["bits"] = 7
    path.write_text(json.dumps(content))
    with pytest.raises(QuantizeError, match=r"'a\.b' has bits that are no option"):
        BitPlan.load(path)


def test_what_is_no_plan_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    for text in (
        None,
        "bits",
        "[]",
        '{"kind": "x", "version": 1}',
        '{"kind": "geutil.quantize.BitPlan", "version": 1}',
    ):
        if text is not None:
            path.write_text(text)
        with pytest.raises(QuantizeError, match=r"holds no plan of bits.*save"):
            BitPlan.load(path)


def test_names_are_taken_by_the_letter(named):
    m, data = named
    # A number of numpy is a number.
    plan = choose_bits(m, data, size=np.float32(0.7), method="min_max")
    bits = {layer.ops[0]: layer.bits for layer in plan.layers}
    assert sorted(bits.values()) == [4, 4, 8]
    copy = m.cut()
    report = quantize(copy, is_training=False, overrides=plan.overrides)
    found = {q.op: q.weights.bits for q in report.quantized if q.weights}
    assert found == bits


REFUSED = {
    "no budget": ({}, "one of size=, noise= and accuracy="),
    "two budgets": ({"size": 0.5, "noise": 20.0}, "one budget"),
    "no bytes": ({"size": 0}, "size=0 is no budget"),
    "a share above all": ({"size": 1.5}, "as a float from 0 to 1"),
    "too small": ({"size": 0.4}, r"the smallest takes 96, which is 50\.0%"),
    "too quiet": (
        {"noise": 90.0, "method": "min_max"},
        r"reaches 90 dB.* best has \d+\.\d\d dB",
    ),
    "a loss of less than nothing": ({"accuracy": (len, -1.0)}, "loss of -1.0 is none"),
    "no bits": ({"size": 0.5, "bits": ()}, "holds no number of bits"),
    "half a bit": ({"size": 0.5, "bits": (4.5, 8)}, "whole number, not 4.5"),
    "one bit": ({"size": 0.5, "bits": (1, 8)}, "bits=1 is out of range"),
    "16 bits": ({"size": 0.5, "bits": (8, 16)}, r"cannot store weights of 16 bits"),
    "12 bits": (
        {"size": 0.5, "bits": (12,), "scheme": "weight_only_int8"},
        "it stores up to 8, or 16",
    ),
    "another scheme": ({"size": 0.5, "scheme": "float16"}, "not of 'float16'"),
    "no batches": ({"size": 0.5, "batches": 0}, "batches=0"),
    "another method": ({"size": 0.5, "method": "x"}, "no method 'x'"),
}


OTHER_TYPES = [
    {"bits": 8, "size": 0.5},
    {"bits": "48", "size": 0.5},
    {"size": "60%"},
    {"size": True},
    {"noise": "loud"},
    {"noise": float("nan")},
    {"accuracy": 0.5},
    {"accuracy": (0.5, len)},
]


def test_what_cannot_be_done_is_refused(named):
    m, data = named
    exact = results(m, data)

    def closeness(outputs, index):
        return -float(np.abs(outputs["y"] - exact).max())

    kept = {"accuracy": (closeness, 1e-6), "method": "min_max"}
    lost = kept, r"loses 1e-06.*allow a loss of [\d.]+"
    before = len(m.graph.get_operations())
    for arguments, said in (*REFUSED.values(), lost):
        print("refused:", said)
        with pytest.raises(QuantizeError, match=said):
            choose_bits(m, data, **arguments)
    for arguments in OTHER_TYPES:
        with pytest.raises(ArgumentTypeError, match=next(iter(arguments))):
            choose_bits(m, data, **arguments)
    assert len(m.graph.get_operations()) == before


def test_subjects_that_are_no_float_model_are_refused(named):
    m, data = named
    with pytest.raises(
        ArgumentTypeError, match=r"geutil\.model\.Model, not for a \S+Graph"
    ):
        choose_bits(tf.Graph(), data, size=0.5)
    quantized = assembled(m, data, {})
    with pytest.raises(QuantizeError, match="quantized already, by '"):
        choose_bits(quantized, data, size=0.5)
    empty = opened(lambda x: {"y": tf.nn.relu(x)}, spec(None, 3, name="x"))
    with pytest.raises(QuantizeError, match="no layer of the model has weights"):
        choose_bits(empty, {"x": normal(4, 3)}, size=0.5)
    with pytest.raises(QuantizeError, match=r"no output.*varies"):
        choose_bits(m, {"x": np.zeros((0, 8), np.float32)}, size=0.5)


def test_without_ortools_the_extra_is_named(named):
    m, data = named
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ortools.linear_solver", None)
        for budget in ({"size": 0.8}, {"noise": 20.0}):
            with pytest.raises(MissingExtraError, match=r"OR-Tools.*geutil\[plan\]"):
                choose_bits(m, data, **budget)


# -- the knapsack, against every choice that there is ----------------------------------

WHOLE = st.integers(0, 10**8)
NOISE = st.floats(-1.0, 1e3, allow_nan=False)
# In quarters, whose sums are exact: a limit is kept or not, and nothing between.
QUARTERS = st.integers(-8, 4000).map(lambda n: n / 4)


def items(noise):
    options = st.lists(st.tuples(WHOLE, noise), min_size=1, max_size=3)
    return st.lists(options, min_size=1, max_size=5)


def tables(drawn):
    """Return the sizes and the noises of options."""
    return tuple([[pair[i] for pair in row] for row in drawn] for i in range(2))


def totals(table, choices):
    return [sum(row[i] for row, i in zip(table, c, strict=True)) for c in choices]


def all_choices(sizes):
    return list(itertools.product(*(range(len(row)) for row in sizes)))


@examples(200)
@given(items(NOISE), st.floats(0, 1))
def test_least_noise_is_that_of_the_best_choice(drawn, share):
    sizes, noises = tables(drawn)
    choices = all_choices(sizes)
    budget = int(share * sum(map(max, sizes)))
    fitting = [
        noise
        for size, noise in zip(
            totals(sizes, choices), totals(noises, choices), strict=True
        )
        if size <= budget
    ]
    chosen = least_noise(sizes, noises, budget)
    if not fitting:
        assert chosen is None
        return
    assert totals(sizes, [chosen])[0] <= budget
    largest = max(abs(noise) for row in noises for noise in row)
    # The solver's optimum is one of float64.
    assert totals(noises, [chosen])[0] <= min(fitting) + 1e-9 * largest


@examples(200)
@given(items(QUARTERS), st.integers(-50, 10_000).map(lambda n: n / 4))
def test_least_size_is_that_of_the_best_choice(drawn, limit):
    sizes, noises = tables(drawn)
    choices = all_choices(sizes)
    pairs = list(zip(totals(sizes, choices), totals(noises, choices), strict=True))
    quiet = [size for size, noise in pairs if noise <= limit]
    chosen = least_size(sizes, noises, limit)
    if not quiet:
        assert chosen is None
        return
    assert totals(noises, [chosen])[0] <= limit
    # Shares of the largest size: a byte of a hundred million is told.
    assert totals(sizes, [chosen])[0] == min(quiet)
    ties = [noise for size, noise in pairs if size == min(quiet)]
    assert totals(noises, [chosen])[0] == min(ties)


def test_a_budget_is_kept_to_the_byte():
    """What fits by all but one byte of a billion does not fit."""
    sizes = [[10**9, 10**9 + 1], [10**9 - 1, 10**9]]
    noises = [[1.0, 0.0], [1.0, 0.5]]
    assert least_noise(sizes, noises, 2 * 10**9 + 1) == [1, 1]
    assert least_noise(sizes, noises, 2 * 10**9) == [1, 0]
    assert least_noise(sizes, noises, 2 * 10**9 - 1) == [0, 0]
    assert least_noise(sizes, noises, 2 * 10**9 - 2) is None


def test_hundreds_of_items():
    """Of the same size, so that those are chosen that make the most noise."""
    noises = [[1.0 + n % 7, 0.0] for n in range(300)]
    chosen = least_noise([[1, 2]] * 300, noises, 400)
    wanted = sorted(row[0] for row in noises)[:200]
    assert totals(noises, [chosen]) == [sum(wanted)]
    assert sum(chosen) == 100
