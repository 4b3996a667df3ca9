"""Noise layer by layer, against numpy, unedited networks and LiteRT's interpreter."""

import contextlib
import itertools
from functools import cache, partial

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.errors import QuantizeError
from geutil.quantize import (
    Int8Comparison,
    LayerNoise,
    Spec,
    calibrate,
    compare_int8,
    quantize,
    to_int8,
    to_tflite,
)
from tests.quantize.converted import both_results, opened, spec
from tests.quantize.kernelwise import ran
from tests.quantize.small_networks import normal, prepared, separable
from tests.quantize.tiny import fake_quant
from tests.settings import needs_eager
from tests.thorough import crossed

pytestmark = needs_eager

W1, B1 = normal(8, 16, seed=1), normal(16, seed=2)
W2, B2 = normal(16, 5, seed=3), normal(5, seed=4)
X = normal(40, 8, seed=5)
SAMPLE = {"x": X}


def ratio(exact, other):
    """Return the signal-to-noise ratio of an array, in dB."""
    exact, other = np.asarray(exact, np.float64), np.asarray(other, np.float64)
    return 10 * np.log10((exact**2).sum() / ((other - exact) ** 2).sum())


def cosine(a, b):
    a, b = np.float64(a).ravel(), np.float64(b).ravel()
    return a @ b / np.sqrt((a @ a) * (b @ b))


def two_layers(x):
    hidden = tf.nn.relu(tf.nn.bias_add(tf.matmul(x, W1, name="first"), B1), "hidden")
    return {"y": tf.nn.bias_add(tf.matmul(hidden, W2, name="second"), B2, name="out")}


def range_of(m, name):
    return [m.variables[f"{name}/{end}"].numpy() for end in ("min", "max")]


class TwoLayers:
    """The same network in numpy: in float, simulated, and each layer by itself.

    Activations are as they are where nothing is said of them.
    """

    def __init__(self, m, activations=(8, False), weights=8):
        first, second = (
            fake_quant(w, *range_of(m, f"{name}/weights_quant"), weights, True)
            for w, name in ((W1, "first"), (W2, "second"))
        )
        names = ("x/input_quant", "first/act_quant", "second/act_quant")
        self.ranges = [range_of(m, name) for name in names if activations]

        def stored(values, place):
            if not activations:
                return values
            return fake_quant(values, *self.ranges[place], *activations)

        def hidden(x, w):
            return np.maximum(x @ w + B1, 0.0)

        x = X.astype(np.float64)
        self.float = [x, hidden(x, W1), hidden(x, W1) @ W2 + B2]
        simulated = [stored(x, 0)]
        simulated.append(stored(hidden(simulated[0], first), 1))
        simulated.append(stored(simulated[1] @ second + B2, 2))
        self.simulated = simulated
        self.alone = [
            stored(x, 0),
            stored(hidden(x, first), 1),
            stored(self.float[1] @ second + B2, 2),
        ]


def compared(function, sample=SAMPLE, **choices):
    """Return the model of a function, its file, and how they compare by layers."""
    m = prepared(opened(function, spec(None, 8, name="x")), sample, **choices)
    blob = to_tflite(m)
    return m, blob, compare_int8(m, blob, sample, layers=True)


@pytest.fixture(scope="module")
def narrow():
    """Two layers in int8, whose ranges leave values out."""
    m = prepared(opened(two_layers, spec(None, 8, name="x")), SAMPLE)
    for name in ("first/act_quant/max", "second/act_quant/min", "second/act_quant/max"):
        m.variables[name].assign(m.variables[name] * 0.6)
    blob = to_int8(m)
    return m, blob, compare_int8(m, blob, SAMPLE, layers=True)


def check_noise(layers, reference, tolerance=0.02):
    rows = [*zip(reference.float, reference.simulated, reference.alone, strict=True)]
    # An input that is not rounded is no layer.
    rows = rows if reference.ranges else rows[1:]
    for layer, (exact, simulated, alone) in zip(layers, rows, strict=True):
        wanted = ratio(exact, alone), ratio(exact, simulated)
        found = layer.own, layer.accumulated
        assert found == pytest.approx(wanted, abs=tolerance)
        assert layer.cosine == pytest.approx(cosine(exact, simulated), abs=1e-6)


def test_noise_is_what_numpy_computes(narrow):
    m, _, comparison = narrow
    assert [(e.op, e.op_type, e.tensor) for e in comparison.layers] == [
        ("x", "Placeholder", "x:0"),
        ("first", "MatMul", "hidden:0"),
        ("second", "MatMul", "out:0"),
    ]
    check_noise(comparison.layers, TwoLayers(m))


def test_clipped_values_are_counted_by_hand(narrow):
    """Rounding at the ends of a range is no clipping."""
    m, _, comparison = narrow
    reference = TwoLayers(m)
    for layer, exact, (low, high) in zip(
        comparison.layers, reference.float, reference.ranges, strict=True
    ):
        lowest, highest = fake_quant(np.float32([-3e38, 3e38]), low, high)
        step = (float(highest) - lowest) / 255
        outside = (exact < lowest - step / 2) | (exact > highest + step / 2)
        assert layer.clipped == pytest.approx(outside.mean(), abs=1e-12)
    assert comparison.layers[0].clipped == 0.0
    assert min(layer.clipped for layer in comparison.layers[1:]) > 0.001


def kept_tensors(blob, sample):
    """Return the tensors of a file as numbers, by name, and their steps."""
    interpreter, tensors = ran(blob, sample), {}
    for detail in interpreter.get_tensor_details():
        scale, zero = detail["quantization"]
        with contextlib.suppress(ValueError):
            stored = interpreter.get_tensor(detail["index"])
            tensors[detail["name"]] = (stored.astype(np.float64) - zero) * scale, scale
    return tensors


def test_the_file_is_read_tensor_by_tensor(narrow):
    m, blob, comparison = narrow
    reference, tensors = TwoLayers(m), kept_tensors(blob, SAMPLE)
    for layer, exact, simulated in zip(
        comparison.layers, reference.float, reference.simulated, strict=True
    ):
        values, scale = tensors[layer.file_tensor]
        assert not layer.unmatched
        assert layer.file_ratio == pytest.approx(ratio(exact, values), abs=0.02)
        steps = np.abs(np.round((values - simulated) / scale)).max()
        assert layer.file_steps == steps


def test_batches_add_up(narrow):
    m, blob, whole = narrow
    parts = [{"x": X[:7]}, {"x": X[7:]}]
    before = m.graph.as_graph_def()
    split = compare_int8(m, blob, parts, layers=True)
    assert m.graph.as_graph_def() == before
    for one, other in zip(whole.layers, split.layers, strict=True):
        assert one.own == pytest.approx(other.own, abs=1e-9)
        assert one.accumulated == pytest.approx(other.accumulated, abs=1e-9)
        assert one.file_ratio == pytest.approx(other.file_ratio, abs=1e-9)
        assert (one.clipped, one.file_steps) == (other.clipped, other.file_steps)


def test_layers_are_told_on_request_alone(narrow):
    m, blob, comparison = narrow
    plain = compare_int8(m, blob, SAMPLE)
    assert plain.layers == ()
    assert "accumulated" not in str(plain)
    assert plain.outputs == comparison.outputs


# Bits of weights; what activations are rounded to, where 16 bits leave the lowest
# integer out; and the noise of the input in dB at least.
OTHER_SCHEMES = {
    "weight_only_int8": (8, None, None),
    "weight_only_int4": (4, None, None),
    "int16x8": (8, (16, True), 80),
    "int8x4": (4, (8, False), 40),
}


@pytest.mark.parametrize("scheme", OTHER_SCHEMES)
def test_other_schemes(scheme):
    bits, activations, at_least = OTHER_SCHEMES[scheme]
    m = prepared(
        opened(two_layers, spec(None, 8, name="x")),
        SAMPLE if activations else None,
        scheme=scheme,
    )
    blob = to_tflite(m, scheme=scheme)
    layers = compare_int8(m, blob, SAMPLE, layers=True).layers
    off = 0.02 if activations else 0.01
    check_noise(layers, TwoLayers(m, activations, bits), off)
    for layer in layers:
        assert not layer.unmatched
        off = 1.0 if activations else 0.01
        assert layer.file_ratio == pytest.approx(layer.accumulated, abs=off)
        if not activations:
            assert layer.clipped is None
            # The file computes in float, with the same weights.
            assert layer.file_steps < 1e-3
    assert not activations or layers[0].own > at_least


def branching(images):
    """Branches of three kinds, joined by a concat, of which one only moves values."""
    layers = tf.keras.layers
    x = image = layers.Input(images.shape[1:], name="image")
    left = layers.Conv2D(6, 3, 1, "same", activation="relu", name="left")(x)
    right = layers.Conv2D(6, 1, activation="tanh", name="right")(x)
    pooled = layers.MaxPool2D(3, 1, "same", name="pooled")(left)
    x = layers.Concatenate(name="joined")([left, right, pooled])
    x = layers.Conv2D(8, 3, 2, "same", activation="sigmoid", name="behind")(x)
    x = layers.Dense(4, name="logits")(layers.Flatten()(x))
    return tf.keras.Model(image, x, name="net")


def attention(images):
    """Attention on tokens as in a vision transformer, with a layer norm and softmax."""
    layers = tf.keras.layers
    x = image = layers.Input(images.shape[1:], name="image")
    x = layers.Reshape([16, -1])(x)
    h = layers.LayerNormalization(name="norm")(x)
    x = layers.Add(name="sum")([x, layers.MultiHeadAttention(2, 6, name="mix")(h, h)])
    x = layers.GlobalAveragePooling1D()(x)
    return tf.keras.Model(image, layers.Dense(5, name="logits")(x), name="net")


IMAGES = normal(6, 8, 8, 3, seed=8)
NETWORKS = {
    "separable": partial(separable, blocks=1),
    "branching": branching,
    "attention": attention,
}


def randomized(network):
    """Give vectors, which start as zeros and ones, values as training would."""
    random = np.random.default_rng(3)
    for variable in network.variables:
        if len(variable.shape) == 1:
            low, high = (-0.5, 0.5)
            if any(word in variable.path for word in ("gamma", "variance")):
                low, high = (0.6, 1.4)
            variable.assign(random.uniform(low, high, variable.shape))
    return network


class Deployed:
    """A network of Keras, its quantized model and its file."""

    def __init__(self, name, **choices):
        tf.keras.utils.set_random_seed(1)
        self.network = randomized(NETWORKS[name](IMAGES))
        self.sample = {"image": IMAGES}
        self.model = model.open(self.network)
        fold_batch_norms(self.model)
        self.report = quantize(self.model, is_training=False, **choices)
        if not choices.get("scheme", "").startswith("weight"):
            calibrate(self.model, self.sample, "min_max", rounding="nearest")
        self.blob = to_tflite(self.model)
        self.comparison = compare_int8(self.model, self.blob, self.sample, layers=True)
        self.layers = {layer.op: layer for layer in self.comparison.layers}

    def of(self, name):
        """Return the noise of the layer of Keras with a name."""
        # An activation may have a kernel of its own behind it.
        return next(
            layer
            for op, layer in self.layers.items()
            if f"/{name}_1/" in op or f"/{name}/" in op
        )


deployed = cache(Deployed)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_last_layer_is_as_far_off_as_the_output(name):
    net = deployed(name)
    exact = net.network(IMAGES).numpy()
    simulated, values = both_results(net.model, net.blob, net.sample)["logits"]
    last = net.of("logits")
    assert last.accumulated == pytest.approx(ratio(exact, simulated), abs=0.05)
    assert last.cosine == pytest.approx(cosine(exact, simulated), abs=1e-5)
    (output,) = net.comparison.outputs
    assert last.file_steps == output.most
    assert last.file_ratio == pytest.approx(ratio(exact, values), abs=0.05)


MATCHED = {"separable": 8, "branching": 8, "attention": 26}
"""How many tensors are found at least; the converter leaves the others out."""


@pytest.mark.parametrize("name", NETWORKS)
def test_tensors_of_the_file_hold_what_they_are_matched_to(name):
    net = deployed(name)
    matched = [layer for layer in net.layers.values() if not layer.unmatched]
    assert len(matched) >= MATCHED[name]
    assert not any(layer.silent for layer in net.layers.values())
    # A product and its reshaped twin are the same: neither is in doubt.
    assert not any("can be" in layer.unmatched for layer in net.layers.values())
    tensors = [layer.file_tensor for layer in matched]
    assert len(set(tensors)) == len(tensors)
    for layer in matched:
        # Of another tensor the ratio would be about 0 dB, and steps up to 255.
        assert layer.file_ratio == pytest.approx(layer.accumulated, abs=3.0), layer
        assert layer.file_steps <= 12, layer
    for layer in net.layers.values():
        assert (layer.file_steps is None) == bool(layer.unmatched)
        assert (layer.file_ratio is None) == (layer.file_tensor == "")


FOUND = {"separable": (5, 8), "branching": (4, 10), "attention": (5, 26)}
"""How many tensors are found: of files in float, and of others at least."""


@pytest.mark.parametrize(
    ("name", "scheme"),
    crossed(NETWORKS, ["int8x4", "int16x8", "weight_only_int8"], together=1),
)
def test_tensors_are_found_in_files_of_other_schemes(name, scheme):
    layers = Deployed(name, scheme=scheme).comparison.layers
    matched = [entry for entry in layers if not entry.unmatched]
    in_float, at_least = FOUND[name]
    weights_only = scheme == "weight_only_int8"
    if weights_only:
        # All layers with weights; biases are fused, and are no zeros here.
        assert len(matched) == len(layers) == in_float
    else:
        assert len(matched) >= at_least
    for entry in matched:
        # Float kernels compute what is simulated, but for the order of sums.
        off = 0.05 if weights_only else 1.0
        assert entry.file_ratio == pytest.approx(entry.accumulated, abs=off), entry


def first_layers(kinds):
    """Return a network of layers, of which each may have a bias and a Relu."""

    def compute(x):
        made = {}
        for n, (bias, relu) in enumerate(kinds):
            with tf.name_scope(f"layer_{n}"):
                y = tf.matmul(x, normal(8, 16, seed=10 + n), name="first")
                y = tf.nn.bias_add(y, B1, name="biased") if bias else y
                y = tf.nn.relu(y, name="hidden") if relu else y
                made[f"y{n}"] = tf.matmul(y, normal(16, 5, seed=50 + n), name="second")
        return made

    return prepared(opened(compute, spec(None, 8, name="x")), scheme="weight_only_int8")


def test_float_kernels_that_compute_something_else_are_no_match():
    # In float no steps tell whether a layer of the file goes on to a bias.
    kinds = itertools.product((False, True), repeat=2)
    pairs = list(itertools.product(kinds, repeat=2))
    ours, theirs = (first_layers(side) for side in zip(*pairs, strict=True))
    blob = to_tflite(theirs, scheme="weight_only_int8")
    layers = compare_int8(ours, blob, SAMPLE, layers=True).layers
    found = {layer.op: layer for layer in layers}
    for n, pair in enumerate(pairs):
        first = found[f"layer_{n}/first"]
        assert (first.unmatched == "") == (pair[0] == pair[1]), pair
        assert pair[0] != pair[1] or first.file_steps < 1e-3


def test_results_of_one_op_are_told_apart():
    def compute(x):
        first, second = tf.split(tf.matmul(x, W1, name="dense"), 2, -1, name="parts")
        return {"y": first * 2.0 + tf.nn.tanh(second)}

    _, blob, comparison = compared(compute)
    parts = [entry for entry in comparison.layers if entry.op == "parts"]
    assert [entry.tensor for entry in parts] == ["parts:0", "parts:1"]
    tensors = kept_tensors(blob, SAMPLE)
    halves = np.split(X.astype(np.float64) @ W1, 2, -1)
    for entry, exact in zip(parts, halves, strict=True):
        values, _ = tensors[entry.file_tensor]
        assert entry.file_ratio == pytest.approx(ratio(exact, values), abs=0.02)
    lines = str(comparison).splitlines()
    assert sum(line.endswith("parts:1 (Split)") for line in lines) == 1


def test_a_layer_of_two_bits_is_named_worst():
    name, worst = "branching", "behind"
    overrides = {f"{worst}.*onvolution": Spec(weight_bits=2)}
    net = Deployed(name, overrides=overrides)
    named = min(net.comparison.layers, key=lambda layer: layer.own)
    assert named is net.of(worst)
    assert named.own < deployed(name).of(worst).own - 15
    lines = str(net.comparison).splitlines()
    (told,) = (line for line in lines if "adds most noise" in line)
    loudness = f"adds most noise: {named.own:.1f} dB by itself, marked with >"
    assert f"{len(net.layers)} layer(s); '{named.op}'" in told
    assert loudness in told
    marked = [line for line in lines if line.startswith(">")]
    assert len(marked) == 1
    assert marked[0].split()[:3] == [">", f"{named.own:.1f}", "dB"]
    assert named.op in marked[0]


def test_what_only_moves_values_adds_none():
    net = deployed("branching")
    pooled = net.of("pooled")
    assert pooled.own == float("inf")
    assert pooled.accumulated == pytest.approx(net.of("left").accumulated, abs=4)
    assert pooled.clipped == 0.0
    (row,) = (r for r in str(net.comparison).splitlines() if pooled.op in r)
    assert row.split()[0] == "exact"


def test_each_kernel_is_told_once_in_an_order_in_which_they_run():
    for name in NETWORKS:
        net = deployed(name)
        kernels = {entry.kernel for entry in net.report.quantized}
        assert sorted(e.op for e in net.comparison.layers) == sorted(kernels)
        ops = {op.name: op for op in net.model.graph.get_operations()}
        seen = set()
        for layer in net.comparison.layers:
            waiting, reached = [ops[layer.op]], set()
            while waiting:
                for t in waiting.pop().inputs:
                    if t.op.name not in reached:
                        reached.add(t.op.name)
                        waiting.append(t.op)
            assert reached & set(net.layers) <= seen
            seen.add(layer.op)


def test_what_the_file_does_without_is_said():
    unmatched = [
        entry for entry in deployed("attention").layers.values() if entry.unmatched
    ]
    assert unmatched
    lines = str(deployed("attention").comparison).splitlines()
    for entry in unmatched:
        assert any(entry.op in line and entry.unmatched in line for line in lines)
        assert entry.unmatched in str(entry)


def test_rounding_for_readers_of_a_float_op_is_told():
    def compute(x):
        return {"y": tf.matmul(tf.nn.elu(tf.matmul(x, W1, name="first")), W2)}

    m, _, comparison = compared(compute)
    layers = comparison.layers
    (elu,) = (layer for layer in layers if layer.op_type == "Elu")
    low, high = next(
        range_of(m, name.removesuffix("/min"))
        for name in m.variables
        if name.endswith("/min") and "elu" in name.lower()
    )
    hidden = X.astype(np.float64) @ W1
    exact = np.where(hidden > 0, hidden, np.expm1(hidden))
    wanted = ratio(exact, fake_quant(exact, low, high))
    assert elu.own == pytest.approx(wanted, abs=0.02)


def test_models_without_quantization_are_refused():
    m = opened(two_layers, spec(None, 8, name="x"))
    before = m.graph.as_graph_def()
    blob = to_tflite(m, scheme="float16")
    with pytest.raises(QuantizeError, match=r"holds no FakeQuant op.*layers=True"):
        compare_int8(m, blob, SAMPLE, layers=True)
    assert compare_int8(m, blob, SAMPLE).layers == ()
    assert m.graph.as_graph_def() == before


def test_a_model_for_training_is_told_as_it_will_be_deployed():
    m, _, comparison = compared(two_layers, is_training=True, quant_delay=10)
    check_noise(comparison.layers, TwoLayers(m))


def test_a_layer_without_signal_is_not_called_exact():
    def compute(x):
        dead = tf.nn.relu(tf.nn.bias_add(tf.matmul(x, W1, name="dead"), B1 - 1e3))
        return {"y": tf.matmul(dead, W2, name="behind") + B2}

    _, _, comparison = compared(compute)
    silent = [entry.op for entry in comparison.layers if entry.silent]
    assert "dead" in silent
    assert "x" not in silent
    lines = str(comparison).splitlines()
    (line,) = (line for line in lines if line.endswith("dead (MatMul)"))
    assert line.split()[:2] == ["zeros", "zeros"]


def test_without_noise_none_is_marked():
    inf = float("inf")
    exact = LayerNoise("op", "Conv2D", "op:0", inf, inf, 1.0, 0.0)
    *_, head, _, row = str(Int8Comparison((), 1, (), (), (exact,))).splitlines()
    assert head == "1 layer(s), of which none adds noise"
    assert not row.startswith(">")
