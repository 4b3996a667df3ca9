"""Models of TFLite files, next to what the interpreter makes of the same files."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from geutil import model, tflite
from geutil.batchnorm import fold_batch_norms
from geutil.model import ModelError
from geutil.quantize import calibrate, quantize, to_int8
from geutil.tflite import BrokenFileError, LiteOp, LiteTensor, Quantization
from tests.interpreter import schema
from tests.model.lite_kinds import CASES, Case, ints
from tests.tflite_files import IMAGE, SAMPLES

ROOT = Path(__file__).parents[2]
PLAIN, FAST = (
    OpResolverType.BUILTIN_REF,
    (OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES),
)
# LiteRT registers no plain kernels for these, and that for the last one leaves out a
# channel at the end of each window.
NOT_PLAIN = ("CEIL", "ELU", "ROUND", "SEGMENT_SUM", "LOCAL_RESPONSE_NORMALIZATION")


def _interpreted(blob, given, resolver=PLAIN):
    """Return the results of the interpreter in their order."""
    interpreter = Interpreter(
        model_content=blob, experimental_op_resolver_type=resolver
    )
    inputs = interpreter.get_input_details()
    interpreter.allocate_tensors()
    for detail, value in zip(inputs, given, strict=True):
        interpreter.set_tensor(detail["index"], value)
    interpreter.invoke()
    return [
        interpreter.get_tensor(detail["index"])
        for detail in interpreter.get_output_details()
    ]


def _is_near(found, wanted, share=1e-6):
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    if wanted.dtype.kind not in "fc":
        np.testing.assert_array_equal(found, wanted)
        return
    assert np.abs(found - wanted).max(initial=0) <= share * max(
        np.abs(wanted).max(initial=0), 1e-3
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_kind_computes_as_the_interpreter_does(case):
    lite = case.file()
    m = model.from_tflite(lite)
    results = m.run(**dict(zip(m.inputs, case.given, strict=True)))
    resolver = FAST if case.kind in NOT_PLAIN else PLAIN
    wanted = _interpreted(lite.to_bytes(), case.given, resolver)
    for found, value in zip(results.values(), wanted, strict=True):
        _is_near(found, value)


def test_every_kind_of_the_table_is_tried():
    elsewhere = {
        # In files of several subgraphs, or of numbers that are drawn.
        *("ASSIGN_VARIABLE", "CALL", "CALL_ONCE", "DENSIFY", "IF", "QUANTIZE"),
        *("RANDOM_STANDARD_NORMAL", "RANDOM_UNIFORM", "MULTINOMIAL", "READ_VARIABLE"),
        *("STABLEHLO_COMPOSITE", "VAR_HANDLE", "WHILE"),
    }
    assert {case.kind for case in CASES} | elsewhere == set(model.tflite_kinds())


def test_the_page_lists_every_kind():
    text = (ROOT / "docs" / "howto" / "tflite_model.md").read_text()
    _, taken, refused = re.split(r"^\| (?:reason )?\| kinds \|$", text, flags=re.M)
    rows = [re.findall(r"^\|.*\|$", part, re.M) for part in (taken, refused)]
    listed = [re.findall(r"`(\w+)`", "".join(part)) for part in rows]
    others = {"CUSTOM", "DELEGATE", "PLACEHOLDER_FOR_GREATER_OP_CODES"}
    every = {k for k in vars(schema.BuiltinOperator) if k.isupper()} - others
    assert sorted(listed[0]) == sorted(model.tflite_kinds())
    assert sorted(listed[1]) == sorted(every - set(model.tflite_kinds()))


@pytest.mark.parametrize("name", ["floats", "unfolded", "attention", "lstm", "flow"])
def test_a_file_computes_as_the_interpreter_does(name):
    blob = SAMPLES[name]().blob
    m = model.from_tflite(blob)
    random = np.random.default_rng(3)
    given = [
        random.normal(size=[size or 1 for size in t.shape]).astype(np.float32)
        if t.dtype.is_floating
        else np.int32(4)
        for t in m.inputs.values()
    ]
    runner = _runner(blob)
    named = dict(zip(m.inputs, given, strict=True))
    for key, value in runner(**named).items():
        _is_near(m.run(**named)[key], value, 2e-6)


def _runner(blob, key=None):
    interpreter = Interpreter(
        model_content=blob, experimental_op_resolver_type=OpResolverType.BUILTIN_REF
    )
    return interpreter.get_signature_runner(key)


def test_weights_are_trained_under_the_names_of_the_file():
    lite = tflite.open(SAMPLES["floats"]().blob)
    m = model.from_tflite(lite)
    function = m.to_function()
    layers = [op for op in lite.ops if op.kind in _LAYERS]
    weights = [t for op in layers for t in op.inputs[1:] if t is not None]
    assert len(function.trainable_variables) == len(weights) > len(layers)
    wanted = {t.name.partition(";")[0] for op in layers for t in op.outputs}
    assert wanted <= {op.name for op in m.graph.get_operations()}
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(function(**dict.fromkeys(m.inputs, IMAGE))["head"] ** 2)
    gradients = tape.gradient(loss, function.trainable_variables)
    assert all(gradient is not None for gradient in gradients)


_LAYERS = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")


def test_signatures_share_the_variables_of_equal_buffers():
    m = model.from_tflite(SAMPLES["two_signatures"]().blob, signature="encode")
    assert list(m.signatures) == ["decode", "encode"]
    assert list(m.inputs) == ["x"] and list(m.outputs) == ["code"]
    runner = _runner(SAMPLES["two_signatures"]().blob, "encode")
    x = np.float32([[1, 2, 3], [4, 5, 6]])
    _is_near(m.run(x=x)["code"], runner(x=x)["code"])


def test_a_batch_that_is_open_stays_open():
    m = model.from_tflite(SAMPLES["two_signatures"]().blob, signature="encode")
    assert m.run(x=np.ones([5, 3], np.float32))["code"].shape == (5, 4)


def test_integers_become_ranges_that_the_file_has():
    """Converted again, the file has the same steps, and computes the same integers."""
    blob = SAMPLES["int8"]().blob
    m = model.from_tflite(blob)
    again = to_int8(m)
    name = next(iter(m.inputs))
    assert _levels(again, name, IMAGE) == _levels(blob, name, IMAGE)
    kinds = [[op.kind for op in tflite.open(b).ops] for b in (blob, again)]
    assert kinds[0] == kinds[1]
    results = (t for t in tflite.open(blob).tensors if t.producer)
    stored = {_first(t): t.quantization for t in results}
    # The converter puts digits behind some names.
    made = [t for t in tflite.open(again).tensors if t.producer and _first(t) in stored]
    assert len(made) >= len(kinds[0]) - 2
    for tensor in made:
        steps = stored[_first(tensor)]
        assert tensor.quantization.zero_points == steps.zero_points
        np.testing.assert_allclose(tensor.quantization.scales, steps.scales, 1e-6)


def test_quantizing_again_finds_the_ranges():
    """Nothing is rounded twice, and no range has to be calibrated."""
    blob = SAMPLES["int8"]().blob
    m = model.from_tflite(blob)
    before = [op.type for op in m.graph.get_operations()]
    quantize(m, is_training=False)
    assert [op.type for op in m.graph.get_operations()] == before
    name = next(iter(m.inputs))
    assert _levels(to_int8(m), name, IMAGE) == _levels(blob, name, IMAGE)


def _first(tensor):
    return tensor.name.partition(";")[0]


def _levels(blob, name, image):
    """Return the integers that a file makes of an image."""
    runner = _runner(blob)
    scale, zero = runner.get_input_details()[name]["quantization"]
    levels = np.clip(np.round(image / scale) + zero, -128, 127).astype(np.int8)
    (found,) = runner(**{name: levels}).values()
    return found.tolist()


def test_integers_compute_within_a_step():
    blob = SAMPLES["int8"]().blob
    m = model.from_tflite(blob)
    name = next(iter(m.inputs))
    ((key, detail),) = _runner(blob).get_output_details().items()
    scale, zero = detail["quantization"]
    for seed in range(3):
        image = np.random.default_rng(seed).random(IMAGE.shape, np.float32)
        wanted = (np.array(_levels(blob, name, image)) - zero) * scale
        found = m.run(**{name: image})[key]
        assert np.abs(found - wanted).max() <= 1.01 * scale


def test_a_float_file_is_folded_and_quantized_as_its_model_is():
    sample = SAMPLES["unfolded"]()
    m = model.from_tflite(sample.blob)
    report = fold_batch_norms(m)
    quantize(m, is_training=False)
    name = next(iter(m.inputs))
    calibrate(m, [{name: IMAGE}])
    kinds = [op.kind for op in tflite.open(to_int8(m)).ops]
    assert kinds == [op.kind for op in tflite.open(SAMPLES["int8"]().blob).ops], report


def _dilated_norms():
    layers = tf.keras.layers
    x = sound = layers.Input([16, 2], name="x")
    for rate in (1, 2):
        x = layers.Conv1D(4, 3, padding="causal", dilation_rate=rate)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    net = tf.keras.Model(sound, layers.Dense(3)(x))
    random = np.random.default_rng(0)
    net.set_weights([random.uniform(0.5, 1.5, w.shape) for w in net.get_weights()])
    return net.call, [None, 16, 2]


def _branch():
    w = tf.constant(np.random.default_rng(0).normal(size=(4, 4)), tf.float32)

    def body(x):
        y = x @ w
        above = tf.reduce_sum(y) > 0
        return tf.cond(above, lambda: tf.nn.relu(y), lambda: tf.tanh(y @ w))

    return body, [None, 4]


def _integers(m, data):
    """Return the kinds of a model's int8 file, and the steps of its integers."""
    fold_batch_norms(m)
    quantize(m, is_training=False)
    calibrate(m, data)
    graph = tflite.open(to_int8(m)).graphs[0]
    results = [t for op in graph.ops for t in op.outputs]
    return [op.kind for op in graph.ops], [
        (t.quantization.scales[0], t.quantization.zero_points[0])
        for t in results
        if t.quantization
    ]


@pytest.mark.parametrize("network", [_dilated_norms, _branch])
def test_a_float_file_gets_the_integers_that_its_source_gets(network):
    body, shape = network()
    spec = tf.TensorSpec(shape, tf.float32, name="x")
    function = tf.function(body, autograph=False, input_signature=[spec])
    concrete = function.get_concrete_function()
    converter = tf.lite.TFLiteConverter.from_concrete_functions([concrete], function)
    again = model.from_tflite(converter.convert())
    x = np.random.default_rng(1).normal(size=[2, *shape[1:]]).astype(np.float32)
    wanted_kinds, wanted = _integers(model.open(concrete), [{"x": x}])
    kinds, steps = _integers(again, [{"x": x}])
    assert kinds == wanted_kinds
    np.testing.assert_allclose(steps, wanted, rtol=1e-4)


def test_zeros_that_are_filled_in_are_converted_again():
    w = tf.constant(np.random.default_rng(0).normal(size=(4, 4)), tf.float32)
    spec = tf.TensorSpec([None, 4], tf.float32, name="x")

    @tf.function(autograph=False, input_signature=[spec])
    def body(x):
        rows = tf.shape(x)[0]
        return {
            "y": x @ w + tf.zeros([rows, 4]) @ w + tf.zeros([rows, 4, 1])[..., 0] @ w
        }

    m = model.open(body)
    x = np.random.default_rng(1).normal(size=(2, 4)).astype(np.float32)
    quantize(m, is_training=False)
    calibrate(m, [{"x": x}])
    blob = to_int8(m)
    again = to_int8(model.from_tflite(blob))
    assert "FILL" in [op.kind for op in tflite.open(again).ops]
    levels = [_levels(each, "x", x[:1]) for each in (blob, again)]
    assert levels[0] == levels[1]


def test_flex_ops_are_the_ops_of_tensorflow():
    m = model.from_tflite(SAMPLES["flex"]().blob)
    x = np.float32([[4, 2, 0], [2, 5, 1], [0, 1, 3]])
    np.testing.assert_allclose(m.run(x=x)["y"], np.linalg.cholesky(x), rtol=1e-5)


def test_custom_ops_of_others_are_refused_by_name():
    lite = _one_op(LiteOp("Magic", (), (), custom_options=b"\x01"))
    before = lite.to_bytes()
    with pytest.raises(ModelError, match=r"1 custom op\(s\) Magic.*cut them off first"):
        model.from_tflite(lite)
    assert lite.to_bytes() == before


def _one_op(op):
    """Return a file of one op on a vector."""
    lite = tflite.LiteFile()
    graph = tflite.LiteGraph("main")
    lite.graphs.append(graph)
    x, y = (LiteTensor(name, "float32", [2]) for name in "xy")
    op.inputs, op.outputs = (x, *op.inputs[1:]), (y,)
    graph.inputs, graph.outputs = (x,), (y,)
    graph.add_op(op)
    return lite


def test_kinds_without_ops_of_tensorflow_are_refused():
    with pytest.raises(ModelError, match=r"1 op\(s\) SVDF, <LiteOp SVDF -> 'y'>"):
        model.from_tflite(_one_op(LiteOp("SVDF", (None,), ())))


def test_a_subgraph_that_calls_itself_is_refused():
    op = LiteOp("CALL", (None,), ())
    lite = _one_op(op)
    op.options["subgraph"] = lite.graphs[0]
    with pytest.raises(ModelError, match="calls itself"):
        model.from_tflite(lite)


def test_a_tensor_that_nothing_makes_is_refused():
    lite = _one_op(LiteOp("ADD", (None, LiteTensor("lost", "float32", [2])), ()))
    with pytest.raises(ModelError, match="'lost' is read before anything makes it"):
        model.from_tflite(lite)


def test_a_shape_that_tensorflow_cannot_hold_is_refused():
    lite = _one_op(LiteOp("NEG", (None,), ()))
    lite.graphs[0].inputs[0].shape = [2**30] * 3
    with pytest.raises(ModelError, match="cannot be computed by TensorFlow"):
        model.from_tflite(lite)


def test_mutated_files_are_refused_in_words():
    random = np.random.default_rng(0)
    opened = 0
    blob = _streaming().to_bytes()
    for _ in range(300):
        mutated = bytearray(blob)
        mutated[random.integers(len(blob))] = random.integers(256)
        try:
            model.from_tflite(bytes(mutated))
            opened += 1
        except (ModelError, BrokenFileError):
            pass
    assert 0 < opened < 300


def _streaming():
    """Return a file that adds what it is given to a variable, which starts at 5."""
    lite = tflite.LiteFile()
    main, start = tflite.LiteGraph("main"), tflite.LiteGraph("start")
    lite.graphs += [main, start]

    def handle():
        made = LiteTensor("handle", "resource", [])
        options = {"container": "", "shared_name": "total"}
        return LiteOp("VAR_HANDLE", (), (made,), options), made

    first, there = handle()
    five = LiteTensor("five", "float32", [2])
    five.value = np.float32([5, 5])
    start.add_op(first)
    start.add_op(LiteOp("ASSIGN_VARIABLE", (there, five), ()))
    x, before, after = (LiteTensor(n, "float32", [2]) for n in ("x", "before", "after"))
    second, here = handle()
    for op in (
        LiteOp("CALL_ONCE", (), (), {"init_subgraph_index": start}),
        second,
        LiteOp("READ_VARIABLE", (here,), (before,)),
        LiteOp("ADD", (before, x), (after,), {"fused_activation_function": "NONE"}),
        LiteOp("ASSIGN_VARIABLE", (here, after), ()),
    ):
        main.add_op(op)
    main.inputs, main.outputs = (x,), (after,)
    return lite


def test_variables_of_a_file_keep_their_values_between_runs():
    lite = _streaming()
    m = model.from_tflite(lite)
    interpreter = Interpreter(model_content=lite.to_bytes())
    interpreter.allocate_tensors()
    (detail,), (result,) = (
        interpreter.get_input_details(),
        interpreter.get_output_details(),
    )
    for values in ([1, 2], [3, 4], [-1, -1]):
        interpreter.set_tensor(detail["index"], np.float32(values))
        interpreter.invoke()
        found = m.run(x=np.float32(values))["after"]
        np.testing.assert_array_equal(found, interpreter.get_tensor(result["index"]))


@pytest.mark.parametrize(
    ("kind", "option"),
    [("CALL", "subgraph"), ("STABLEHLO_COMPOSITE", "decomposition_subgraph_index")],
)
def test_called_subgraphs_stand_in_the_place_of_calls(kind, option):
    lite = _one_op(LiteOp(kind, (None,), ()))
    body = _one_op(LiteOp("NEG", (None,), ())).graphs[0]
    lite.graphs.append(body)
    lite.graphs[0].ops[0].options[option] = body
    found = model.from_tflite(lite).run(x=np.float32([1, -2]))
    np.testing.assert_array_equal(found["y"], [-1, 2])


def test_numbers_are_drawn_in_the_shape_and_type_of_the_file():
    for kind in ("RANDOM_UNIFORM", "RANDOM_STANDARD_NORMAL"):
        case = Case(kind, [ints(2, 3)], options={"seed": 1, "seed2": 2})
        (found,) = model.from_tflite(case.file()).run(in0=ints(2, 3)).values()
        assert found.shape == (2, 3) and len(np.unique(found)) == 6
    logits = np.float32([[-100, 0, -100]])
    case = Case(
        "MULTINOMIAL", [logits], [np.int32(5)], {"seed": 1, "seed2": 2}, ["int32"]
    )
    (found,) = model.from_tflite(case.file()).run(in0=logits).values()
    np.testing.assert_array_equal(found, [[1] * 5])


def _product(dtype, integers, steps, x_steps=None):
    """Return a file of a product by weights that are stored with steps."""
    lite = _one_op(LiteOp("FULLY_CONNECTED", (None,), ()))
    (graph,) = lite.graphs
    (op,) = graph.ops
    weights = LiteTensor("weights", dtype, integers.shape, steps)
    weights.value = integers
    (x,) = graph.inputs
    x.shape = [1, 3]
    if x_steps is not None:
        x.dtype, x.quantization = x_steps
    op.inputs = (x, weights, None)
    graph.add_tensor(weights)
    return lite


@pytest.mark.parametrize("dtype", ["int4", "int8", "uint8", "int16"])
def test_weights_are_rounded_to_the_steps_of_the_file(dtype):
    """Whatever training makes of them, as far as their range reaches."""
    integers = np.int64([[1, 2, 3], [0, -7, 5]])
    zero = 3 if dtype == "uint8" else 0
    lowest, highest = {
        "int4": (-7, 7),
        "int8": (-127, 127),
        "uint8": (0, 255),
        "int16": (-32767, 32767),
    }[dtype]
    steps = Quantization((0.5,), (zero,))
    integers = integers + 7 if zero else integers
    lite = _product(dtype, integers.astype(np.int16), steps)
    m = model.from_tflite(lite)
    x = np.float32([[1, 10, 100]])
    np.testing.assert_allclose(
        m.run(x=x)["y"], x @ (0.5 * (integers - zero)).T, rtol=1e-6
    )
    weights = m.variables["weights"]
    weights.assign(np.float32([[0.7, 1e9, -1e9], [0.2, -0.3, 1.6]]).T)
    levels = np.array([[1, highest - zero, lowest - zero], [0, -1, 3]])
    found = [m.run(x=row[None])["y"][0] for row in np.eye(3, dtype=np.float32)]
    np.testing.assert_allclose(np.array(found).T, 0.5 * levels, rtol=1e-6)


def test_each_channel_of_weights_has_its_own_range():
    steps = Quantization((0.5, 2.0), (0, 0), axis=0)
    lite = _product("int8", np.int8([[1, 2, 3], [4, 5, -6]]), steps)
    m = model.from_tflite(lite)
    m.variables["weights"].assign(np.float32([[0.7, 0.8, 1e9], [0.7, 3.1, 1e9]]).T)
    found = [m.run(x=row[None])["y"][0] for row in np.eye(3, dtype=np.float32)]
    np.testing.assert_allclose(
        np.array(found).T, [[0.5, 1.0, 63.5], [0.0, 4.0, 254.0]], rtol=1e-6
    )


def test_a_constant_with_a_zero_point_outside_its_type_is_refused():
    lite = _product("int8", np.int8([[1, 2, 3]]), Quantization((0.5,), (300,)))
    with pytest.raises(ModelError, match="zero point outside -128 to 127"):
        model.from_tflite(lite)


def test_an_open_file_gives_its_model_itself():
    lite = _one_op(LiteOp("NEG", (None,), ()))
    np.testing.assert_array_equal(
        lite.to_model().run(x=np.float32([1, 2]))["y"], [-1, -2]
    )
