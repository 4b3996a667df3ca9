"""Ops of TFLite files matched to what they compute, which running both tells."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from geutil import model, quantize, report, tflite
from geutil.batchnorm import fold_batch_norms
from tests import tflite_files
from tests.call_counts import count_calls
from tests.interpreter import new_interpreter
from tests.settings import needs_eager
from tests.thorough import is_quick
from zoo.models import MODELS

pytestmark = needs_eager

ROWS = 2
PIXELS = 32
CONVERSIONS = ("DEQUANTIZE", "QUANTIZE")
CALIBRATED = ("int8", "int8x4", "int16x8")
WEIGHTS_ALONE = (
    *("dynamic_range", "dynamic_range_int4", "weight_only_int8", "weight_only_int4"),
)
SCHEMES = (*CALIBRATED, *WEIGHTS_ALONE, "float16")


def mobile_net():
    """Return a MobileNetV2 of few pixels, whose batch norms are those of no start."""
    net = tf.keras.applications.MobileNetV2(
        (PIXELS, PIXELS, 3), 0.35, weights=None, classes=10
    )
    random = np.random.default_rng(2)
    for v in net.variables:
        if v.path.endswith(("moving_mean", "beta")):
            v.assign(random.normal(scale=0.1, size=v.shape))
        elif v.path.endswith("moving_variance"):
            v.assign(random.uniform(0.02, 0.08, v.shape))
    return net


@functools.cache
def network(name):
    """Return a network's model as it is read, a sample, and who owns its variables."""
    own = {"units": tflite_files.network, "MobileNetV2": mobile_net}
    owner = own[name]() if name in own else MODELS[name].build()
    m = model.open(owner if name in own else owner.concrete())
    random = np.random.default_rng(1)
    sample = {
        name: random.uniform(size=[ROWS, *t.shape[1:]]).astype(np.float32)
        for name, t in m.inputs.items()
    }
    return m, sample, owner


def file_of(name, scheme):
    """Return what `geutil quantize` makes of a network, and save of no scheme."""
    m, sample, _ = network(name)
    if scheme == "float":
        return tflite_files.saved(m)
    m = m.cut()
    fold_batch_norms(m)
    if scheme != "float16":
        quantize.quantize(m, scheme=scheme, is_training=False)
        if scheme in CALIBRATED:
            quantize.calibrate(m, [sample], "min_max")
    return quantize.to_tflite(m, scheme=scheme)


@functools.cache
def values(name):
    """Return what each op of a network makes of its sample."""
    m, sample, _ = network(name)
    m = m.cut()
    kept = [*m.outputs]
    reached = m.reached_ops()
    made = {op.name: op.outputs[0] for op in reached if op.inputs and op.outputs}
    floats = {n: t for n, t in made.items() if t.dtype == tf.float32}
    m.outputs.update({f"value{i}": t for i, t in enumerate(floats.values())})
    for output in kept:
        del m.outputs[output]
    return dict(zip(floats, m.run(**sample).values(), strict=True))


def apart(ours, theirs):
    """Return how far values are apart; if their layouts differ, in order of size."""
    if ours.size != theirs.size:
        return np.inf
    if ours.shape != theirs.shape:
        ours, theirs = np.sort(ours, axis=None), np.sort(theirs, axis=None)
    return np.sqrt(np.mean(np.square(ours - theirs, dtype=np.float64)))


def wrong(name, blob):
    """Yield the ops of a file that are matched to others than those they compute."""
    m, sample, _ = network(name)
    found = report.difference(m, blob)
    exact = values(name)
    main = tflite.open(blob).graphs[0]
    places = {tensor: i for i, tensor in enumerate(main.tensors)}
    interpreter = new_interpreter(blob, keep_tensors=True)
    (end,), (value,) = interpreter.get_input_details(), sample.values()
    interpreter.resize_tensor_input(end["index"], value.shape)
    interpreter.allocate_tensors()
    scale, zero = end["quantization"]
    if scale:
        limits = np.iinfo(end["dtype"])
        value = np.round(value / np.float32(scale)) + zero
        value = np.clip(value, limits.min, limits.max)
    interpreter.set_tensor(end["index"], value.astype(end["dtype"]))
    interpreter.invoke()
    yield from (f"{name} of the graph is missing" for name, _ in found.missing)
    for op, node in zip(found.ops, main.ops, strict=True):
        tensor = node.outputs[0]
        if tensor.dtype == "int32" or (op.is_added and node.kind in CONVERSIONS):
            continue
        made = interpreter.get_tensor(places[tensor])
        steps = tensor.quantization
        if steps is not None:
            (scale,), (zero,) = steps.scales, steps.zero_points
            made = (made - np.float64(zero)) * scale
        # Two that make one result, in two layouts, have a number behind its name.
        result = op.op if op.op in exact else op.op.rpartition("_")[0]
        if result not in exact:
            yield f"{op.op} ({op.op_type}) is matched to nothing"
            continue
        others = [
            apart(value, made) for value in exact.values() if value.shape == made.shape
        ]
        # Biases that are near 0 let two results be nearly one.
        if apart(exact[result], made) > 1.2 * min(others, default=np.inf):
            yield f"{op.op} ({op.op_type}) computes something else"


SMALL = ("units", "UNet", "Conv1D", "FusedNorms")
SOME = ("float", "int8", "int16x8", "dynamic_range")


@pytest.mark.parametrize("name", SMALL)
def test_every_op_of_a_file_computes_what_it_is_matched_to(name):
    schemes = SOME if is_quick() else ("float", *SCHEMES)
    faults = {s: [*wrong(name, file_of(name, s))] for s in schemes}
    assert not any(faults.values()), faults


def renamed(blob):
    """Return a file whose tensors are named after nothing."""
    file = tflite.open(blob)
    for i, tensor in enumerate(file.tensors):
        tensor.name = f"t{i}"
    return file.to_bytes()


def test_a_mobile_net_is_matched_op_by_op():
    """So it is by its order and the flow of data alone."""
    (m, *_), blob = network("MobileNetV2"), file_of("MobileNetV2", "int8")
    found = report.difference(m, blob)
    assert len(found.ops) == 65
    assert found.is_empty
    # Each of its blocks is one of "units".
    assert is_quick() or not [*wrong("MobileNetV2", blob)]
    unnamed = report.difference(m, renamed(blob))
    assert unnamed.is_empty
    assert not any(op.named for op in unnamed.ops)
    for one, other in zip(found.ops, unnamed.ops, strict=True):
        assert one.op == other.op
        assert {*one.named, *one.placed} == {*other.placed}


def test_sizes_that_the_converter_folds_are_found_by_their_names():
    """TFLite does not run the first; the second is in one signature of several."""
    for name in ("GroupNorm", "Signatures"):
        m = network(name)[0]
        for scheme in SOME:
            if (name, scheme) == ("GroupNorm", "int8"):
                # The converter fails.
                continue
            found = report.difference(m, file_of(name, scheme))
            assert not found.missing, (name, scheme)
            assert {op.op_type for op in found.added} <= {*CONVERSIONS}, (name, scheme)


def test_ops_that_the_converter_merges_are_part_of_one():
    kernels = np.random.default_rng(3).normal(size=(3, 1, 1, 3, 3)).astype(np.float32)

    @tf.function(input_signature=[tf.TensorSpec([1, 4, 4, 3], name="x")])
    def body(x):
        x = tf.nn.conv2d(x, kernels[0], 1, "SAME", name="first")
        left = tf.nn.conv2d(tf.nn.relu(x, "one"), kernels[1], 1, "SAME", name="left")
        right = tf.nn.conv2d(tf.nn.relu(x, "two"), kernels[2], 1, "SAME", name="right")
        return {"y": left * right}

    m = model.open(body)
    found = report.difference(m, tflite_files.saved(m))
    assert found.is_empty
    ops = {op.op: {*op.named, *op.placed} for op in found.ops}
    assert ops["one"] == {"first", "one", "two"}
    assert ops["left"] == {"left"}
    assert ops["right"] == {"right"}


def chain(blocks, readers):
    """Return a graph of products and sums, and readers of the last, and its file."""
    file = tflite.LiteFile()
    t = file.add_input("x", "float32", [1, 2])
    w = file.add_constant("w", np.float32([[1, 2], [3, 4]]))
    for i in range(blocks):
        t = file.add(
            "FULLY_CONNECTED", [t, w, None], name=f"block{i}", keep_num_dims=True
        )
    ends = [file.add("EXP", [t], name=f"end{i}") for i in range(readers)]
    file.set_outputs(ends)

    @tf.function(input_signature=[tf.TensorSpec([1, 2], name="x")])
    def body(x):
        weights = tf.constant([[1.0, 3.0], [2.0, 4.0]])
        for _ in range(blocks):
            x = tf.matmul(x, weights) + tf.constant([0.0, 0.0])
        return {f"end{i}": tf.exp(x) for i in range(readers)}

    return model.open(body), file.to_bytes()


def test_matching_is_linear_in_ops_and_edges():
    calls = []
    for n in (60, 600):
        m, blob = chain(n, n)
        count, found = count_calls(lambda m=m, blob=blob: report.difference(m, blob))
        assert found.is_empty
        assert len(found.ops) == 2 * n
        calls.append(count)
    assert calls[1] < 10.5 * calls[0], calls
