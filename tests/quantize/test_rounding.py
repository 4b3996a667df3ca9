"""Rounding of weights by data, against TensorFlow's layers, papers and brute force."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from geutil import model
from geutil.errors import QuantizeError
from geutil.quantize import NotRounded, Rounded, compare_int8, quantize, to_tflite
from geutil.quantize import calibrate as calibrated
from geutil.quantize.calibration import rounding
from geutil.quantize.calibration.ranges import find_sites
from geutil.quantize.calibration.rounding import Stages
from geutil.quantize.calibration.rounding_targets import Grid, Target, find_targets
from geutil.quantize.planning.layer_rows import rows_of
from geutil.quantize.planning.network import Network
from geutil.quantize.spec import Range
from tests.quantize.converted import both_results, opened, spec
from tests.quantize.small_networks import (
    branch_inputs,
    branch_weights,
    normal,
    two_branches,
)
from tests.settings import needs_eager
from tests.thorough import examples

pytestmark = needs_eager
IMAGE = spec(None, 8, 8, 3, name="x")
BY_DATA = ["gptq", "adaround"]


def conv(*shape, **options):
    options = {"strides": 1, "padding": "SAME", **options}
    return lambda x: tf.nn.conv2d(x, normal(*shape), **options)


LAYERS = {
    "same": ([2, 7, 6, 3], conv(3, 3, 3, 4)),
    "strides": ([2, 7, 6, 3], conv(3, 2, 3, 4, strides=2)),
    "valid": ([2, 7, 6, 3], conv(3, 3, 3, 4, padding="VALID", dilations=2)),
    "explicit": (
        [2, 7, 6, 3],
        conv(3, 3, 3, 4, padding=[[0, 0], [2, 1], [0, 1], [0, 0]], strides=2),
    ),
    "groups": ([2, 7, 6, 6], conv(3, 3, 2, 9)),
    "depthwise": (
        [2, 7, 6, 3],
        lambda x: tf.nn.depthwise_conv2d(x, normal(3, 3, 3, 2), [1, 2, 2, 1], "SAME"),
    ),
    "product": ([2, 5], lambda x: tf.matmul(x, normal(5, 4))),
    "turned": ([2, 5], lambda x: tf.matmul(x, normal(4, 5), transpose_b=True)),
    "sequence": ([2, 6, 5], lambda x: tf.matmul(x, normal(1, 5, 4))),
    "matrices": ([3, 6, 5], lambda x: tf.matmul(x, normal(3, 5, 4))),
    "heads": ([2, 6, 5], lambda x: tf.einsum("abc,cde->abde", x, normal(5, 3, 4))),
    "of heads": (
        [2, 6, 3, 4],
        lambda x: tf.einsum("abde,dec->abc", x, normal(3, 4, 5)),
    ),
}


def layer_in(m):
    (layer,) = Network(m.graph, m.outputs.values()).layers.values()
    return layer


@pytest.mark.parametrize("name", LAYERS)
def test_rows_times_matrices_are_what_a_layer_makes(name):
    shape, function = LAYERS[name]
    m = opened(lambda x: {"y": function(x)}, spec(*shape, name="x"))
    layer = layer_in(m)
    rows = rows_of(layer)
    kernel = tf.get_static_value(layer.kernel)
    x = normal(*shape, seed=1)
    made = rows.rows(tf.constant(x)).numpy() @ rows.matrices(kernel)
    # Channels of the result are those of the first group, then of the next.
    made = made.transpose(1, 0, 2) if name not in ("sequence", "matrices") else made
    expected = function(tf.constant(x)).numpy()
    np.testing.assert_allclose(made.reshape(expected.shape), expected, atol=1e-4)
    assert np.array_equal(rows.weights(rows.matrices(kernel)), kernel)


def test_layers_of_several_matrices_are_refused():
    for shape, function in [
        ([1, 6, 5], lambda x: tf.matmul(x, normal(3, 5, 4))),
        ([2, 5, 3], lambda x: tf.einsum("abd,bde->abe", x, normal(5, 3, 4))),
    ]:
        m = opened(lambda x, f=function: {"y": f(x)}, spec(*shape, name="x"))
        assert "several matrices" in rows_of(layer_in(m))


def grid_of(weights, bits):
    """Return symmetric levels, a range for each column."""
    half = 2 ** (bits - 1) - 1
    step = np.abs(weights).max(1, keepdims=True) / np.float32(half)
    return Grid(
        np.broadcast_to(-half * step, weights.shape),
        np.broadcast_to(step, weights.shape),
        2 * half,
    )


def problem(inputs, outputs, seed, rows=40):
    """Return a Hessian of correlated data, and weights."""
    random = np.random.default_rng(seed)
    data = random.normal(size=(1, rows, inputs)) @ random.normal(size=(inputs, inputs))
    hessian = data.swapaxes(1, 2) @ data / rows
    weights = random.normal(size=(1, inputs, outputs)).astype(np.float32)
    return rounding.damped(hessian, 0.01), weights


def error(hessian, weights, rounded):
    apart = rounded - weights
    return float(np.einsum("gio,gij,gjo->", apart, hessian, apart))


def assert_follows_the_paper(hessian, weights, grid, made):
    """Follow GPTQ by the inverse of the Hessian, as Frantar et al. 2022 write it down.

    Each weight has to be on the level nearest to what the paper rounds there; of two
    that are as near, either.
    """
    order = np.argsort(-np.diag(hessian), kind="stable")
    inverse = np.linalg.inv(hessian[np.ix_(order, order)])
    upper = np.linalg.cholesky(inverse).T
    left = weights[order].astype(np.float64)
    for k, row in enumerate(order):
        step, low = grid.step[0, row], grid.low[0, row]
        inside = np.clip(left[k], low, low + step * grid.most)
        assert np.all(np.abs(made[row] - inside) <= step * (0.5 + 1e-3))
        apart = (left[k] - made[row]) / upper[k, k]
        left[k:] -= upper[k, k:, None] * apart


@given(st.integers(2, 40), st.integers(1, 5), st.integers(0, 1000), st.integers(2, 8))
@examples(100)
def test_gptq_is_that_of_the_paper(inputs, outputs, seed, bits):
    hessian, weights = problem(inputs, outputs, seed)
    grid = grid_of(weights, bits)
    made = rounding.gptq(hessian, weights, grid)
    assert_follows_the_paper(hessian[0], weights[0], grid, made[0])


def test_blocks_and_groups_do_not_matter():
    problems = [problem(300, 3, seed, 600) for seed in range(2)]
    hessians, weights = zip(*problems, strict=True)
    hessian, both = np.concatenate(hessians), np.concatenate(weights)
    made = rounding.gptq(hessian, both, grid_of(both, 4))
    for group in range(2):
        grid = grid_of(weights[group], 4)
        assert_follows_the_paper(
            hessians[group][0], weights[group][0], grid, made[group]
        )


def least_error(hessian, weights, grid):
    """Return the least error of one column with each weight up or down."""
    lower = np.floor((weights - grid.low) / grid.step)
    return min(
        error(hessian, weights, grid.value(lower + np.array(up)[None, :, None]))
        for up in itertools.product((0, 1), repeat=weights.shape[1])
    )


@pytest.mark.parametrize("method", BY_DATA)
def test_errors_are_between_the_least_and_those_of_the_nearest(method):
    solve = {"gptq": rounding.gptq, "adaround": lambda *a: rounding.adaround(*a, 400)}
    total, total_of_nearest = 0.0, 0.0
    for seed in range(12):
        hessian, weights = problem(10, 1, seed)
        grid = grid_of(weights, 4)
        made = solve[method](hessian, weights, grid)
        total += error(hessian, weights, made)
        total_of_nearest += error(hessian, weights, grid.nearest(weights))
        levels = (made - grid.low) / grid.step
        assert np.abs(levels - np.round(levels)).max() < 1e-3
        if method == "adaround":
            assert np.abs(made - weights).max() <= grid.step.max() * 1.001
            least = least_error(hessian, weights, grid)
            assert error(hessian, weights, made) >= least * 0.999
    assert total < 0.8 * total_of_nearest


def test_a_grid_of_zeros_has_one_value():
    weights = np.zeros((1, 4, 2), np.float32)
    hessian, _ = problem(4, 2, 0)
    for solve in (rounding.gptq, lambda *a: rounding.adaround(*a, 10)):
        assert not solve(hessian, weights, grid_of(weights, 4)).any()


def deep(x):
    """A residual network with groups, dilation, a split and a concat."""
    first = tf.nn.relu(tf.nn.bias_add(conv(3, 3, 3, 8)(x), normal(8, seed=1)))
    left, right = tf.split(first, 2, -1)
    weights = normal(3, 3, 4, 4, seed=2) / 6
    left = tf.nn.bias_add(
        tf.nn.conv2d(left, weights, 1, "SAME", dilations=2), normal(4, seed=3)
    )
    right = tf.nn.conv2d(right, normal(3, 3, 2, 4, seed=4) / 4, 1, "SAME")
    joined = first + tf.concat([tf.nn.relu6(left), right], -1)
    depthwise = tf.nn.depthwise_conv2d(
        joined, normal(3, 3, 8, 1, seed=5) / 3, [1, 2, 2, 1], "SAME"
    )
    pooled = tf.reduce_mean(tf.nn.relu(depthwise + normal(8, seed=6)), [1, 2])
    return {"y": tf.matmul(pooled, normal(8, 5, seed=7))}


def data(count=4, seed=20):
    # Neighbouring pixels are alike, as in images.
    noise = normal(count * 16, 10, 10, 3, seed=seed)
    smooth = sum(
        noise[:, i : i + 8, j : j + 8] for i in range(3) for j in range(3)
    ) / np.float32(5)
    return [{"x": x} for x in np.split(smooth, count)]


def calibrate(m, batches, method="min_max", **options):
    """Calibrate by a method that takes little time: the choice is no matter here."""
    return calibrated(m, batches, method, **options)


def noise_of(m, exact, batches):
    apart = [m.run(**b)["y"] - exact.run(**b)["y"] for b in batches]
    return float(np.mean(np.square(apart)))


def quantized(function=deep, scheme="int8x4", **options):
    m = opened(function, IMAGE)
    quantize(m, is_training=False, scheme=scheme, **options)
    return m


def test_the_network_gets_nearer_to_itself_in_float():
    exact, m = opened(deep, IMAGE), quantized()
    judged = data(seed=30)
    calibrate(m, data(), rounding="nearest")
    nearest = noise_of(m, exact, judged)
    for method in BY_DATA:
        report = calibrate(m, data(), rounding=method)
        assert noise_of(m, exact, judged) < 0.6 * nearest, method
        assert [type(entry) for entry in report.layers] == [Rounded] * 5
        assert all(entry.after < entry.before for entry in report.layers[:3]), method
        text = str(report)
        assert f"weights of 5 layer(s) rounded by {method}, 0 not" in text
    calibrate(m, data(), rounding="nearest")
    assert noise_of(m, exact, judged) == nearest


@pytest.mark.parametrize(
    ("scheme", "usual"),
    [
        *(("int8x4", "gptq"), ("int16x8", "gptq"), ("weight_only_int8", "gptq")),
        *(("int8", "nearest"), ("of float16", "nearest")),
    ],
)
def test_weights_of_fewer_bits_than_activations_are_rounded_by_data(scheme, usual):
    if scheme == "of float16":
        # Of 16 bits are both: no noise of weights alone.
        m = opened(one_layer, IMAGE)
        quantize(m, is_training=False, weight_bits=16, activation_bits=16)
    else:
        m = quantized(one_layer, scheme)
    report = calibrate(m, data())
    assert report.rounding == usual
    assert [type(e) for e in report.layers] == [Rounded] * (usual == "gptq")
    exact, judged = opened(one_layer, IMAGE), data(seed=30)
    found = noise_of(m, exact, judged)
    calibrate(m, data(), rounding="nearest")
    nearest = noise_of(m, exact, judged)
    assert found < 0.6 * nearest if usual == "gptq" else found == nearest


def test_networks_in_training_are_rounded_to_the_nearest():
    m = opened(one_layer, IMAGE)
    quantize(m, is_training=True, scheme="int8x4")
    assert calibrate(m, data()).rounding == "nearest"


def test_layers_with_too_many_inputs_are_listed():
    weights = normal(8200, 2)
    m = opened(lambda x: {"y": tf.matmul(x, weights)}, spec(None, 8200, name="x"))
    quantize(m, is_training=False, scheme="int8x4")
    (entry,) = calibrate(m, [{"x": normal(4, 8200)}]).layers
    assert entry.reason == "multiplies 8200 values, whose products take 0.5 GB"


def test_biases_take_over_the_means():
    """Each channel's mean, over all data, is that of the network in float."""
    exact, m = opened(one_layer, IMAGE), quantized(one_layer)
    calibrate(m, data(), rounding="nearest", correct_bias=True)
    means = [
        np.mean([each.run(**b)["y"] for b in data()], (0, 1, 2, 3))
        for each in (exact, m)
    ]
    step = np.ptp(exact.run(**data()[0])["y"]) / 255
    assert np.abs(means[0] - means[1]).max() < step / 5
    calibrate(m, data(), rounding="nearest")
    plain = np.mean([m.run(**b)["y"] for b in data()], (0, 1, 2, 3))
    assert np.abs(means[0] - plain).max() > step


def one_layer(x):
    # Its results are far from zero, and so are errors of the mean.
    made = tf.nn.bias_add(conv(3, 3, 3, 4)(x + 2.0), normal(4, seed=1))
    return {"y": made}


def test_files_compute_what_is_simulated():
    m = quantized(one_layer)
    for method in BY_DATA:
        calibrate(m, data(), rounding=method)
        compared = compare_int8(m, to_tflite(m), data(seed=31))
        assert compared.most <= 1, method
        assert not compared.missed, method
    m = quantized(scheme="weight_only_int4")
    assert len(calibrate(m, data(), rounding="gptq").layers) == 5
    pairs = both_results(m, to_tflite(m, scheme="weight_only_int4"), data(seed=31))
    expected, found = pairs["y"]
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def test_saved_models_keep_what_was_decided(tmp_path):
    m = quantized()
    calibrate(m, data(), rounding="gptq")
    m.save(tmp_path / "saved")
    again = model.open(str(tmp_path / "saved"))
    batch = data()[0]
    first = m.run(**batch)["y"]
    assert np.array_equal(again.run(**batch)["y"], first)
    # The same is decided twice.
    calibrate(m, data(), rounding="gptq")
    assert np.array_equal(m.run(**batch)["y"], first)
    calibrate(again, data(), rounding="nearest")
    calibrate(m, data(), rounding="nearest")
    assert np.array_equal(again.run(**batch)["y"], m.run(**batch)["y"])


def test_training_goes_on_from_what_was_decided():
    weights = []
    for is_training in (True, False):
        m = opened(deep, IMAGE)
        quantize(m, is_training=is_training, scheme="int8x4")
        report = calibrate(m, data(2), rounding="gptq", clipping="min_max")
        assert len(report.layers) == 5
        made = {n: v for n, v in m.variables.items() if n.endswith("correction")}
        weights.append({name: value.numpy() for name, value in made.items()})
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        np.testing.assert_array_equal(value, weights[1][name])


def transposed(x):
    made = tf.nn.conv2d_transpose(
        x, normal(3, 3, 4, 3), [16, 16, 16, 4], 2, "SAME", name="up"
    )
    return {"y": tf.nn.conv2d(made, normal(1, 1, 4, 2), 1, "SAME", name="out")}


def test_what_is_not_rounded_is_listed_and_variables_stay():
    weights = tf.Variable(normal(3, 3, 3, 3) / 3)

    def shared(x):
        once = tf.nn.relu(tf.nn.conv2d(x, weights, 1, "SAME"))
        return {"y": tf.nn.conv2d(once, weights, 1, "SAME")}

    m = quantized(shared)
    first, second = calibrate(m, data(), rounding="gptq").layers
    assert isinstance(first, Rounded)
    assert second == NotRounded(
        "Conv2D_1", "Conv2D", "has the weights of 'Conv2D', rounded for that"
    )
    read = {
        e.op: m.graph.get_operation_by_name(e.op).inputs[1] for e in (first, second)
    }
    np.testing.assert_array_equal(*m.cut(outputs=read).run().values())
    np.testing.assert_array_equal(weights, normal(3, 3, 3, 3) / 3)
    m = opened(transposed, spec(16, 8, 8, 3, name="x"))
    quantize(m, is_training=False, weight_bits=4)
    up, out = calibrate(m, data(), rounding="gptq").layers
    assert up.reason == "(Conv2DBackpropInput) is no product of rows with a matrix"
    assert isinstance(out, Rounded)


def dying(x):
    """Each layer makes values a millionth as large: their squares are no floats."""
    for seed in range(8):
        x = tf.matmul(x, normal(4, 4, seed=seed) * 1e-6)
    return {"y": x}


def test_values_next_to_nothing_are_rounded_for():
    m = opened(dying, spec(None, 4, name="x"))
    quantize(m, is_training=False, weight_bits=4)
    for method in BY_DATA:
        report = calibrate(m, [{"x": normal(32, 4)}], rounding=method)
        assert all(isinstance(entry, Rounded) for entry in report.layers), method
        assert np.isfinite(m.run(x=normal(8, 4))["y"]).all(), method


def test_what_was_decided_stays_if_data_or_names_are_refused():
    m = quantized(one_layer)
    (entry,) = calibrated(m, data(), rounding="gptq").layers
    assert isinstance(entry, Rounded)
    before = {name: v.numpy() for name, v in m.variables.items()}
    for bad, options, said in [
        ([], {}, "the dataset is empty"),
        ([{"x": normal(2, 8, 8, 4)}], {}, "has shape"),
        (data(), {"rounding": "best"}, "'best'; there are nearest, gptq, adaround"),
        (data(), {"clipping": "best"}, "'best'; there are min_max, mse, octav"),
    ]:
        with pytest.raises(QuantizeError, match=said):
            calibrate(m, bad, **options)
        assert before.keys() == m.variables.keys()
        for name, value in before.items():
            np.testing.assert_array_equal(m.variables[name].numpy(), value)


def test_variables_of_the_same_name_are_left_alone():
    gain = tf.Variable(normal(3), name="gain/correction")
    m = opened(lambda x: one_layer(x + gain), IMAGE)
    quantize(m, is_training=False, scheme="int8x4")
    calibrate(m, data(), rounding="gptq")
    calibrate(m, data(), rounding="nearest")
    np.testing.assert_array_equal(gain.numpy(), normal(3))


def test_delayed_quantization_is_listed():
    m = opened(one_layer, IMAGE)
    quantize(m, is_training=True, quant_delay=10)
    (entry,) = calibrate(m, data(), rounding="gptq").layers
    assert entry.reason == "has weights that change after they are rounded"


def test_stages_make_what_the_network_makes():
    exact, m = opened(deep, IMAGE), quantized()
    calibrate(m, data(), rounding="nearest")
    layers = list(Network(m.graph, m.outputs.values()).layers.values())
    samples = [{"x": tf.constant(b["x"])} for b in data(2)]
    stages = Stages(m.graph, m.inputs, layers, samples, lambda op: None)
    for index, layer in enumerate(layers):
        found = stages.data_of(index)
        tensor = layer.op.inputs[layer.data]
        whole = m.cut(outputs={"t": tensor})
        for batch, value in zip(data(2), found.simulated, strict=True):
            np.testing.assert_array_equal(value, whole.run(**batch)["t"])
        if index == 0:
            np.testing.assert_array_equal(found.exact[0], data(2)[0]["x"])
    (last,) = [la for la in exact.graph.get_operations() if la.type == "MatMul"]
    whole = exact.cut(outputs={"t": last.inputs[0]})
    for batch, value in zip(data(2), found.exact, strict=True):
        np.testing.assert_allclose(value, whole.run(**batch)["t"], atol=1e-5)


def targets_of(m):
    sites = find_sites(m.graph, m.variables)
    found = find_targets(Network(m.graph, m.outputs.values()), sites)
    return [entry for entry in found if isinstance(entry, Target)]


def branches(weights, **options):
    m = opened(lambda x: two_branches(x, weights), IMAGE)
    quantize(m, is_training=False, **options)
    calibrate(m, [{"x": x} for x in branch_inputs()], rounding="nearest")
    return m


def test_octav_finds_where_its_model_of_the_error_is_least():
    m = branches(branch_weights(), weight_bits=4)
    target = targets_of(m)[0]
    weights = branch_weights()["left"]
    ends = target.site.read()
    found = rounding.octav(target, ends, target.matrices(weights), np.zeros(()))
    for channel in range(4):
        size = np.abs(weights[..., channel].ravel().astype(np.float64))

        def modelled(s, size=size):
            inside = size <= s
            clipped = np.sum((size[~inside] - s) ** 2)
            return s**2 * 4.0**-4 / 3 * inside.sum() + clipped

        tried = np.linspace(0.01, size.max(), 2_000)
        best = min(map(modelled, tried))
        assert modelled(min(found.high[channel], size.max())) <= best * 1.001
    assert np.all(found.high <= ends.high)


def test_mse_takes_the_best_of_thirteen_ranges():
    m = branches(branch_weights(), weight_bits=3)
    for target, key in zip(targets_of(m), ("left", "right", "dense"), strict=True):
        weights = branch_weights()[key]
        matrices = target.matrices(weights)
        random = np.random.default_rng(0)
        importance = random.uniform(0.1, 3.0, matrices.shape[:2])
        hessian = np.stack([np.diag(row) for row in importance])
        ends = target.site.read()
        found = rounding.mse(target, ends, matrices, hessian)
        flat = weights.reshape(-1, np.size(ends.high))
        counted = target.simulated(
            np.broadcast_to(importance[:, :, None], matrices.shape)
        ).reshape(flat.shape)

        def measured(high, flat=flat, counted=counted):
            step = high / 3
            rounded = np.clip(np.round(flat / step), -3, 3) * step
            return (counted * (rounded - flat) ** 2).sum(0)

        tried = [measured(ends.high * f) for f in np.linspace(0.4, 1.0, 13)]
        np.testing.assert_allclose(measured(found.high), np.min(tried, 0), rtol=1e-3)
        assert isinstance(found, Range)
