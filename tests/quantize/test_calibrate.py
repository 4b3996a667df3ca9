"""Calibration, against what the network computes before it is quantized."""

import gc
import io
import sys

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.errors import ArgumentTypeError, MissingExtraError, QuantizeError
from geutil.quantize import calibrate, quantize, to_int8
from tests.quantize.converted import both_results, opened, spec
from tests.quantize.small_networks import (
    branch_inputs,
    branch_weights,
    normal,
    prepared,
    two_branches,
)
from tests.settings import needs_eager
from tests.thorough import crossed

pytestmark = needs_eager

METHODS = ["best", "moving_average", "min_max", "percentile", "entropy", "mse"]
IMAGE = spec(None, 8, 8, 3, name="x")
MATRIX = normal(4, 4)
v1 = tf.compat.v1
# The values that a range is for; those of a concat share one.
GROUPS = {
    "x/input_quant": ["x"],
    "left/act_quant": ["left", "right"],
    "join/reduce_quant": ["pooled"],
    "dense/act_quant": ["y"],
}


def branches(weights=None, **options):
    weights = weights or branch_weights()
    m = opened(lambda x: two_branches(x, weights), IMAGE)
    report = quantize(m, **{"is_training": False, **options})
    assert report.coverage == 1.0
    return m


@pytest.fixture(scope="module")
def plain():
    """A model whose ranges each test sets."""
    return branches()


@pytest.fixture(scope="module")
def small():
    """A model of one op, whose ranges each test sets."""
    m = opened(lambda x: {"y": tf.nn.relu(x)}, IMAGE)
    quantize(m, is_training=False)
    return m


def activations(inputs):
    """Return the values of each group for each batch, computed eagerly."""
    found = []
    for x in inputs:
        traced = {}
        two_branches(tf.constant(x), branch_weights(), traced)
        found.append(
            {
                name: np.concatenate([traced[t].numpy().ravel() for t in tensors])
                for name, tensors in GROUPS.items()
            }
        )
    return found


def batches(inputs):
    return [{"x": x} for x in inputs]


def range_values(m):
    return {n: v.numpy() for n, v in m.variables.items() if n.endswith(("min", "max"))}


def unchanged(m, before):
    after = range_values(m)
    return all(np.array_equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    "options", [{}, {"is_training": True}, {"is_training": True, "quant_delay": 3}]
)
def test_min_max_and_moving_averages(options):
    m, data = branches(**options), batches(branch_inputs())
    seen = activations(branch_inputs())
    found = calibrate(m, data, "min_max").ranges
    averages = calibrate(m, data, "moving_average", decay=0.75).ranges
    for name in GROUPS:
        ends = [(min(b[name].min(), 0.0), max(b[name].max(), 0.0)) for b in seen]
        wanted = np.min(ends, 0)[0], np.max(ends, 0)[1]
        np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-6)
        average = np.array(ends[0])
        for end in ends[1:]:
            average = 0.75 * average + 0.25 * np.array(end)
        np.testing.assert_allclose(averages[name], average, rtol=1e-5, atol=1e-6)


def test_percentiles(plain):
    # One batch, so that bins stay where they are; and no zeros but those of Relu.
    inputs = branch_inputs(1, batch=16)
    report = calibrate(plain, batches(inputs), "percentile", percentile=98.0)
    (seen,) = activations(inputs)
    for name in ("x/input_quant", "dense/act_quant"):
        values = seen[name]
        width = np.ptp(values) / 2048
        low = -np.percentile(-values, 98.0, method="inverted_cdf")
        high = np.percentile(values, 98.0, method="inverted_cdf")
        np.testing.assert_allclose(report.ranges[name], (low, high), atol=width)


def test_asymmetric_weights():
    m = branches(symmetric_weights=False, per_channel=False)
    report = calibrate(m, batches(branch_inputs(1)), "min_max")
    values = branch_weights()["left"]
    assert report.ranges["left/weights_quant"] == (values.min(), values.max())


def test_variables_that_changed():
    weights = {n: tf.Variable(w) for n, w in branch_weights().items()}
    m = branches(weights)
    calibrate(m, batches(branch_inputs(1)), "min_max")
    weights["left"].assign(weights["left"] * 3)
    report = calibrate(m, batches(branch_inputs(1)), "min_max")
    high = np.abs(weights["left"].numpy()).max((0, 1, 2))
    np.testing.assert_array_equal(report.ranges["left/weights_quant"].high, high)


@pytest.mark.parametrize("method", METHODS)
def test_what_each_method_sets(plain, method):
    weights, m = branch_weights(), plain
    before = m.graph.as_graph_def()
    inputs = branch_inputs(2, batch=16)
    report = calibrate(m, batches(inputs), method)
    assert m.graph.as_graph_def() == before
    layers = {
        "left": np.abs(weights["left"]).max((0, 1, 2)),
        "right": np.abs(weights["right"]).max((0, 1)).ravel(),
        "dense": np.abs(weights["dense"]).max(0),
    }
    assert set(report.ranges) == {*GROUPS, *(f"{n}/weights_quant" for n in layers)}
    assert report.batches == 2
    assert report.method == method or method == "best"
    for name, high in layers.items():
        np.testing.assert_array_equal(
            report.ranges[f"{name}/weights_quant"], (-high, high)
        )
    for name, ends in report.ranges.items():
        for end, value in zip(("min", "max"), ends, strict=True):
            set_to = m.variables[f"{name}/{end}"].numpy()
            np.testing.assert_array_equal(set_to, np.float32(value))
    exact = two_branches(tf.constant(inputs[0]), weights)["y"].numpy()
    found = m.run(x=inputs[0])["y"]
    assert ((found - exact) ** 2).mean() / (exact**2).mean() < 0.01
    # The second time they are the same.
    second = calibrate(m, batches(inputs), method).ranges
    for name, ends in report.ranges.items():
        np.testing.assert_array_equal(second[name], ends)


def test_datasets_of_every_kind(small):
    inputs = branch_inputs()
    wanted = calibrate(small, batches(inputs), "mse").ranges
    went = []

    def generator():
        for batch in batches(inputs):
            went.append(batch)
            yield batch

    whole = tf.data.Dataset.from_tensor_slices({"x": np.concatenate(inputs)}).batch(4)
    for dataset in (generator(), whole, tuple(batches(inputs))):
        found = calibrate(small, dataset, "mse").ranges
        for name, ends in wanted.items():
            np.testing.assert_array_equal(found[name], ends)
    assert len(went) == 3
    assert calibrate(small, {"x": inputs[0]}, "min_max").batches == 1
    # Numbers are cast to the type of the input.
    image = np.arange(192, dtype=np.uint8).reshape(1, 8, 8, 3)
    for numbers in (image, image.astype(np.float64)):
        report = calibrate(small, {"x": numbers}, "min_max")
        assert report.ranges["x/input_quant"] == (0.0, 191.0)


def test_integer_inputs():
    table = normal(20, 8)

    def lookup(ids, scale):
        rows = tf.gather(table, ids) * scale
        return {"y": tf.matmul(rows, normal(8, 5), name="dense")}

    m = opened(
        lookup, spec(None, name="ids", dtype=tf.int32), spec(None, 1, name="scale")
    )
    quantize(m, is_training=False)
    sample = {"ids": [1, 2, 3], "scale": [[1.0], [2.0], [3.0]]}
    report = calibrate(m, sample, "min_max")
    y = (table[[1, 2, 3]] * np.array([[1.0], [2.0], [3.0]])) @ normal(8, 5)
    low, high = report.ranges["dense/act_quant"]
    np.testing.assert_allclose([low, high], [y.min(), y.max()], rtol=1e-5)
    before = range_values(m)
    with pytest.raises(QuantizeError, match="float32 would be cut to int32"):
        calibrate(m, {**sample, "ids": [1.5, 2.0, 3.0]})
    assert unchanged(m, before)


def heads(folder, *scales, ops=("relu", "relu")):
    """Save two heads whose ops have the same names; return what each computes."""
    module = tf.Module()
    module.weights = [tf.Variable(normal(3, 3 + i) * s) for i, s in enumerate(scales)]
    if len(module.weights) == 1:
        module.weights *= 2
    functions = {
        name: tf.function(head(w, op), [spec(None, 3, name="x")], autograph=False)
        for name, w, op in zip(("small", "big"), module.weights, ops, strict=True)
    }
    tf.saved_model.save(module, folder, signatures=functions)
    return {
        name: head(w, op)
        for name, w, op in zip(functions, module.weights, ops, strict=True)
    }


def head(w, op):
    def call(x):
        return {"y": getattr(tf.nn, op)(x @ w, name="act")}

    return call


@pytest.mark.parametrize(
    ("ops", "scales", "order"),
    crossed(
        [("relu", "relu"), ("relu", "tanh")],
        [(1.0, 100.0), (100.0, 1.0)],
        [("small", "big"), ("big", "small")],
        together=1,
    ),
)
def test_signatures_of_the_same_names_have_ranges_of_their_own(
    tmp_path, ops, scales, order
):
    expected = heads(tmp_path / "m", *scales, ops=ops)
    m = model.open(tmp_path / "m", signature="small")
    quantize(m, is_training=False)
    x = normal(64, 3)
    for name in order:
        calibrate(m.signatures[name], {"x": x}, "min_max")
    for name, compute in expected.items():
        wanted = compute(x)["y"].numpy()
        noise = np.mean((m.signatures[name].run(x=x)["y"] - wanted) ** 2)
        # With the range of the other one it is as large as the variance.
        assert noise < 1e-2 * wanted.var()


def test_signatures_of_one_network_share_their_ranges(tmp_path):
    heads(tmp_path / "m", 1.0)
    m = model.open(tmp_path / "m", signature="small")
    report = quantize(m, is_training=False)
    assert not any("/" in name and "big" in name for name in report.variables)
    calibrate(m, {"x": normal(64, 3)}, "min_max")
    first, second = (range_values(m.signatures[name]) for name in ("small", "big"))
    np.testing.assert_equal(first, second)


def test_a_model_that_was_saved_is_calibrated_by_name(plain, tmp_path):
    wanted = calibrate(plain, batches(branch_inputs()), "mse").ranges
    reopened = model.open(plain.save(tmp_path / "saved"))
    assert set(range_values(reopened)) == set(range_values(plain))
    found = calibrate(reopened, batches(branch_inputs()), "mse").ranges
    for name, ends in wanted.items():
        np.testing.assert_array_equal(found[name], ends)


def test_the_report_of_quantize_need_not_be_kept():
    # Its variables would be lost, if the graph did not keep them.
    m = branches()
    gc.collect()
    assert len(range_values(m)) == 14
    calibrate(m, batches(branch_inputs(1)), "min_max")
    gc.collect()
    assert np.isfinite(m.run(x=branch_inputs(1)[0])["y"]).all()
    assert to_int8(m)


def test_tensors_of_zeros_get_a_range():
    weights = branch_weights()
    nothing = {"bias": weights["bias"] - 1e6, "dense": weights["dense"] * 0}
    m = branches(weights | nothing)
    for method in METHODS:
        report = calibrate(m, batches(branch_inputs(1)), method)
        assert np.isfinite(m.run(x=branch_inputs(1)[0])["y"]).all()
        assert report.ranges["dense/act_quant"] == (0.0, 1.0)
        assert not np.any(report.ranges["dense/weights_quant"])


def test_a_choice_of_the_network_is_no_delay():
    def choose(x):
        first, second = tf.nn.relu(x * 2.0), tf.nn.relu(x * 5.0)
        chosen = tf.where(tf.range(4) > 1, first, second)
        return {"y": tf.matmul(chosen, normal(4, 3), name="dense")}

    m = opened(choose, spec(None, 4, name="x"))
    quantize(m, is_training=False)
    x = normal(6, 4)
    report = calibrate(m, {"x": x}, "min_max")
    y = np.where(np.arange(4) > 1, np.maximum(2 * x, 0), np.maximum(5 * x, 0))
    y = y @ normal(4, 3)
    wanted = min(y.min(), 0.0), max(y.max(), 0.0)
    np.testing.assert_allclose(report.ranges["dense/act_quant"], wanted, rtol=1e-5)


BAD = {
    "NaN": (lambda x: [{"x": x}, {"x": np.where(x > 2, np.nan, x)}], "'x.*NaN.*1;"),
    "infinite": (lambda x: {"x": x / 0.0}, "NaN or infinite"),
    "empty": (lambda x: [], "the dataset is empty"),
    "unknown": (lambda x: {"x": x, "z": x}, r"\['x', 'z'\].*has \['x'\]"),
    "missing": (lambda x: [{}], r"inputs \[\].*has \['x'\]"),
    "shape": (lambda x: {"x": x[:, :4]}, r"'x' of batch 0 has shape \(4, 4, 8, 3\)"),
    "rank": (lambda x: {"x": x[0]}, r"the model takes \(None, 8, 8, 3\)"),
    "text": (lambda x: {"x": "text"}, "'x' of batch 0 is no float32 tensor"),
}


def test_nan_that_a_fused_relu6_makes_zeros_of_is_refused():
    layers = tf.keras.layers
    network = tf.keras.Sequential(
        [tf.keras.Input([8, 8, 3], name="x"), layers.Conv2D(4, 3, activation="relu6")]
    )
    m = model.open(network)
    quantize(m, is_training=False)
    before = range_values(m)
    x = np.array(normal(4, 8, 8, 3))
    x[1, 2, 2, 0] = np.nan
    with pytest.raises(QuantizeError, match=r"'x:0' .*NaN.*batch 1;"):
        calibrate(m, [{"x": x[:1]}, {"x": x}], "min_max")
    assert unchanged(m, before)


BAD_NUMBERS = [("decay", -0.1), ("decay", 1.0), ("percentile", 50.0)]
BAD_NUMBERS += [("percentile", 100.1), ("bins", 255)]
TYPES = {
    ArgumentTypeError: [(None, None), (b"text", None), (3.5j, None), ([None], None)],
    QuantizeError: [
        (3, "has shape \\(\\), and the model takes"),
        ([1.0], "has shape \\(1,\\), and the model takes"),
        ("text", "there is no data at 'text'"),
    ],
}


@pytest.mark.filterwarnings("ignore:divide by zero")
def test_bad_data_methods_and_numbers_are_refused_and_no_range_set(small):
    m = small
    before = range_values(m)
    for name, (make, message) in BAD.items():
        methods = ("percentile", "min_max") if name in ("NaN", "infinite") else ("mse",)
        for method in methods:
            with pytest.raises(QuantizeError, match=message):
                calibrate(m, make(branch_inputs(1)[0]), method)
    for error, cases in TYPES.items():
        for data, message in cases:
            with pytest.raises(error, match=message):
                calibrate(m, data)

    def breaking():
        yield from batches(branch_inputs(1))
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        calibrate(m, breaking())
    message = "no method 'median'; the methods are best, mov"
    with pytest.raises(QuantizeError, match=message):
        calibrate(m, batches(branch_inputs(1)), "median")
    for name, value in BAD_NUMBERS:
        with pytest.raises(QuantizeError, match=f"{name}={value}"):
            calibrate(m, batches(branch_inputs(1)), **{name: value})
    assert unchanged(m, before)


def test_what_has_no_ranges_is_refused():
    m = opened(lambda x: two_branches(x, branch_weights()), IMAGE)
    with pytest.raises(QuantizeError, match=r"quantize it first, with geutil"):
        calibrate(m, batches(branch_inputs(1)))
    graph = tf.Graph()
    for other in (graph, None, 3):
        with pytest.raises(ArgumentTypeError, match=r"geutil\.model\.open"):
            calibrate(other, batches(branch_inputs(1)))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(m, monkeypatch, stream, dataset, progress):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", out)
    calibrate(m, dataset, "min_max", progress=progress)
    assert out.getvalue() == ""
    return stream.getvalue()


def test_the_progress_bar_goes_to_stderr(small, monkeypatch):
    # A dataset that does not know its length has a bar as well.
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(batches(branch_inputs())), output_signature={"x": IMAGE}
    )
    listed = batches(branch_inputs())
    for stream, data, progress, is_shown in (
        (Terminal(), listed, None, True),
        (Terminal(), dataset, None, True),
        (Terminal(), {"x": branch_inputs()[0]}, None, True),
        (Terminal(), dataset, True, True),
        (io.StringIO(), listed, None, False),
        (Terminal(), listed, False, False),
    ):
        out = shown(small, monkeypatch, stream, data, progress)
        assert ("calibrating" in out) == is_shown, (stream, data, progress)


def test_without_rich_there_is_no_bar(small, monkeypatch):
    for name in ("rich", "rich.console", "rich.progress"):
        monkeypatch.setitem(sys.modules, name, None)
    m = small
    before = range_values(m)
    with pytest.raises(MissingExtraError, match=r"rich.*pip install geutil"):
        calibrate(m, batches(branch_inputs()), progress=True)
    assert unchanged(m, before)
    data = batches(branch_inputs(1))
    assert "calibrating" not in shown(m, monkeypatch, Terminal(), data, None)


# -- the default, against TFLite's own post-training quantization ----------------------

layers = tf.keras.layers
ROWS = (16, 6)


def varied(count, seed=0):
    """Return batches whose values differ in size, as those of photographs do."""
    random = np.random.default_rng(seed)
    drawn = (random.normal(size=(8, *ROWS)) for _ in range(count))
    sizes = random.uniform(0.2, 2.0, count)
    return [np.float32(x * size) for x, size in zip(drawn, sizes, strict=True)]


def swishing():
    tf.keras.utils.set_random_seed(0)
    x = inputs = layers.Input(ROWS)
    for _ in range(3):
        x = layers.Activation("swish")(layers.Conv1D(12, 3)(x))
    x = layers.Dense(4)(layers.Flatten()(x))
    return tf.keras.Model(inputs, x)


def by_tflite(net, data, folder):
    """Return the file of TFLite's own quantization."""
    m = model.open(net)
    (name,) = m.inputs
    m.save(folder)
    converter = tf.lite.TFLiteConverter.from_saved_model(str(folder))
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: ({name: x} for x in data)
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    converter.inference_input_type = tf.int8
    converter.inference_output_type = tf.int8
    return converter.convert()


def noise(m, blob, net, x):
    """Return what the file is off by, as a share of the variance."""
    (name,), (output,) = m.inputs, m.outputs
    _, found = both_results(m, blob, {name: x})[output]
    exact = net(x, training=False).numpy()
    return np.mean((found - exact) ** 2) / exact.var()


def test_the_default_is_as_good_as_what_tflite_does_itself(tmp_path):
    net, data = swishing(), varied(6)
    m = model.open(net)
    quantize(m, is_training=False)
    (name,) = m.inputs
    report = calibrate(m, [{name: x} for x in data])
    others = np.concatenate(varied(6, seed=1))
    own = noise(m, to_int8(m), net, others)
    assert own <= 1.1 * noise(m, by_tflite(net, data, tmp_path / "net"), net, others)
    assert report.method in report.noise
    calibrate(m, [{name: x} for x in data], "moving_average")
    assert own < noise(m, to_int8(m), net, others)


def outlier(size):
    """Return a network, and batches of values near 1, of which one is large."""
    random = np.random.default_rng(0)
    weights = tf.constant(np.float32(random.normal(size=(50, 8))))

    data = np.float32(random.normal(size=(4, 400, 50)))
    data[0, 0, 0] = size
    m = prepared(
        opened(lambda x: {"y": tf.matmul(x, weights)}, spec(None, 50, name="x"))
    )
    return m, [{"x": x} for x in data]


@pytest.mark.parametrize(("size", "gain"), [(4.0, -0.3), (40.0, 0.8)])
def test_values_are_clipped_where_the_data_says_so(size, gain):
    """By dB that it gains: next to nothing is lost where nothing is far out."""
    m, data = outlier(size)
    report = calibrate(m, data)
    assert report.method == "mse"
    assert list(report.noise) == ["mse", "min_max"]
    assert 10 * np.log10(report.noise["min_max"] / report.noise["mse"]) > gain
    assert "noise / variance: mse" in str(report)
    other = calibrate(m, data, "mse")
    for name, ends in other.ranges.items():
        np.testing.assert_array_equal(report.ranges[name], ends)


def test_batch_norms_that_are_still_there_are_counted():
    random = np.random.default_rng(0)
    kernel = random.normal(size=(3, 3, 3, 4)).astype(np.float32)
    mean, variance, scale, offset = random.uniform(0.5, 1.5, (4, 4)).astype(np.float32)
    moving = [tf.Variable(mean), tf.Variable(variance)]

    def network(x):
        y, *_ = tf.compat.v1.nn.fused_batch_norm(
            tf.nn.conv2d(x, kernel, 1, "SAME"),
            *(scale, offset, moving[0], variance),
            is_training=False,
        )
        z = tf.nn.conv2d(x, -kernel, 1, "SAME")
        z = tf.nn.batch_normalization(z, *moving, offset, scale, 1e-3)
        # What is no norm: a product with a vector, and a layer norm.
        y = tf.nn.relu(y + z) * scale
        spread = tf.math.reduce_variance(y, -1, keepdims=True)
        return {"y": y * tf.math.rsqrt(spread + 1e-3)}

    m, folded = (opened(network, spec(1, 8, 8, 3, name="x")) for _ in range(2))
    (warning,) = quantize(m, is_training=False).warnings
    assert warning.startswith("2 batch norm(s) are still there")
    fold_batch_norms(folded)
    assert quantize(folded, is_training=False).warnings == ()


# -- branches of version 1, of which each batch takes one ------------------------------


@pytest.fixture
def branching():
    """A model that doubles what it reads if it is told so, and multiplies otherwise."""
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [2, 4], name="x")
        double = v1.placeholder(tf.bool, [], name="double")
        no, yes = tf.raw_ops.Switch(data=tf.nn.relu(x @ MATRIX), pred=double)
        taken = tf.raw_ops.Merge(inputs=[no @ MATRIX, yes + yes])
        tf.identity(taken.output, name="y")
    m = model.open(graph, inputs=["x:0", "double:0"], outputs=["y:0"])
    quantize(m, is_training=False)
    return m


def choosing(m, *choices):
    x, double = m.inputs
    random = np.random.default_rng(1)
    rows = random.uniform(-1, 1, (len(choices), 2, 4)).astype(np.float32)
    return [{x: row, double: np.bool_(c)} for row, c in zip(rows, choices, strict=True)]


def test_batches_that_take_all_branches_or_not(branching):
    for method in ("best", "moving_average", "entropy"):
        report = calibrate(branching, choosing(branching, True, False, True), method)
        assert report.ranges
        assert all(np.all(low < high) for low, high in report.ranges.values()), method
    with pytest.raises(QuantizeError, match=r"a branch which none of the 2 batches"):
        calibrate(branching, choosing(branching, True, True))


def _branches(x, double, weights):
    more = [lambda: x @ weights, lambda: x @ tf.constant(2 * MATRIX)]
    return v1.cond(double, *more)


def _loop(x, double, weights):
    start = (0, x @ weights)
    body = lambda i, h: (i + 1, tf.tanh(h @ weights))  # noqa: E731
    return v1.while_loop(lambda i, _: i < 2, body, start)[1]


@pytest.mark.usefixtures("control_flow_v1")
@pytest.mark.parametrize("flow", [_branches, _loop])
def test_weights_that_are_led_into_a_branch_or_a_loop(flow):
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [2, 4], name="x")
        double = v1.placeholder(tf.bool, [], name="double")
        tf.identity(flow(x, double, tf.constant(MATRIX)), name="y")
    m = model.open(graph, inputs=["x:0", "double:0"], outputs=["y:0"])
    report = quantize(m, is_training=False)
    names = [e.weights_range for e in report.quantized if e.weights is not None]
    ranges = calibrate(m, choosing(m, True, False), "min_max").ranges
    highest = np.abs(MATRIX).max(0)
    expected = [highest, 2 * highest] if flow is _branches else [highest]
    np.testing.assert_allclose([ranges[name].high for name in names], expected)
    # Layers are not run one by one where they may have no data.
    said = (
        "loop of version 1"
        if flow is _loop
        else "'cond/matmul' .* no data where another"
    )
    with pytest.raises(QuantizeError, match=f"{said}.*rounding='nearest'"):
        calibrate(m, choosing(m, True, False), "min_max", rounding="gptq")
