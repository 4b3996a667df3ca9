"""Where FakeQuant ops go, and what TFLite makes of it."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework.function import Defun

import geutil as ge
from geutil import model
from geutil.errors import QuantizeError
from geutil.quantize import Spec, quantize
from tests.quantize.converted import Together, is_simulated, opened, spec
from tests.settings import needs_eager

pytestmark = needs_eager

random = np.random.default_rng(0)
IMAGE = spec(1, 8, 8, 4)


def weights(*shape):
    return random.normal(size=shape).astype(np.float32) * 0.5


KERNEL, POINT, DEPTH = weights(3, 3, 4, 4), weights(1, 1, 4, 4), weights(3, 3, 4, 1)
MATRIX, BIAS, TABLE = weights(4, 4), weights(4), weights(10, 4)


def conv(x, kernel=KERNEL, name=None, **more):
    return tf.nn.conv2d(x, kernel, 1, "SAME", name=name, **more)


def biased(x, kernel=KERNEL, **more):
    return tf.nn.bias_add(conv(x, kernel, **more), BIAS)


def names(m):
    """Return the scopes of the FakeQuant ops."""
    ops = m.graph.get_operations()
    return [op.name.rpartition("/")[0] for op in ops if is_simulated(op)]


def behind_an_activation(a):
    y = tf.nn.relu(biased(a))
    return tf.nn.relu6(biased(y, POINT)) + y


def separable(a):
    half = tf.nn.depthwise_conv2d(a, DEPTH, [1] * 4, "SAME")
    return tf.nn.relu(biased(half, POINT))


def with_shape_read(a):
    y = conv(a)
    size = tf.shape(y)[0]
    return tf.reshape(tf.nn.relu(tf.nn.bias_add(y, BIAS)), [size, -1])


# The results that are quantized, and the kernels; None where those may be others.
PLACED = {
    "fused": (lambda a: tf.nn.relu(biased(a)), ["Placeholder", "Relu"], ["CONV_2D"]),
    "before a bypass": (
        lambda a: tf.nn.relu(biased(a, name="conv") + a),
        ["BiasAdd", "Placeholder", "Relu"],
        ["CONV_2D", "ADD"],
    ),
    "a bypass by itself": (
        lambda a: biased(biased(a) + a, POINT),
        ["AddV2", "BiasAdd", "BiasAdd", "Placeholder"],
        ["CONV_2D", "ADD", "CONV_2D"],
    ),
    "a bypass behind an activation": (
        behind_an_activation,
        ["AddV2", "Placeholder", "Relu", "Relu6"],
        ["CONV_2D", "CONV_2D", "ADD"],
    ),
    "product": (
        lambda a: biased(a) * tf.sigmoid(a),
        ["BiasAdd", "Mul", "Placeholder", "Sigmoid"],
        None,
    ),
    "separable": (
        separable,
        ["DepthwiseConv2dNative", "Placeholder", "Relu"],
        ["DEPTHWISE_CONV_2D", "CONV_2D"],
    ),
    "a shape is read": (with_shape_read, ["Placeholder", "Relu"], None),
}


def test_results_are_quantized_where_kernels_end():
    cases = {name: (f, (IMAGE,)) for name, (f, *_) in PLACED.items()}
    cases["a shape is read"] = with_shape_read, (spec(None, 8, 8, 4),)
    made, wrong = Together(cases), {}
    parts = made.parts()
    for name, part in parts.items():
        _, wanted, kinds = PLACED[name]
        found = made.rounded(name)
        right = sorted(found) == wanted and kinds in (None, part.kinds)
        most = 2 if name == "a bypass by itself" else 1
        if not right or part.floats or part.most > most:
            wrong[name] = found, part
    assert wrong == {}
    assert sorted(parts["product"].kinds) == ["CONV_2D", "LOGISTIC", "MUL"]
    assert "before_a_bypass/conv_quant" in names(made.model)
    kernels = {e.op: e.kernel for e in made.report.quantized}
    (kernel,) = {kernels[f"fused/{op}"] for op in ("Relu", "BiasAdd", "Conv2D")}
    assert kernel in kernels


POOLED = {
    "relu": lambda y: y,
    "max_pool": lambda y: tf.nn.max_pool2d(y, 3, 1, "SAME"),
    "pad": lambda y: tf.pad(y, [[0, 0], [1, 1], [1, 1], [0, 0]]),
}


def test_a_pool_shares_the_range_of_what_it_reads():
    def pooling(before):
        def function(a):
            y = before(tf.nn.relu(biased(a)))
            return tf.nn.avg_pool2d(y, 3, 1, "SAME"), biased(y, POINT)

        return function, (IMAGE,)

    made = Together({name: pooling(before) for name, before in POOLED.items()})
    simulated = [op for op in made.model.graph.get_operations() if is_simulated(op)]
    for name, part in made.parts().items():
        (pool,), (relu,) = (
            [
                op
                for op in simulated
                if made.is_of(op.name, name) and op.inputs[0].op.type == kind
            ]
            for kind in ("AvgPool", "Relu")
        )
        pairs = zip(pool.inputs[1:], relu.inputs[1:], strict=True)
        assert all(a is b for a, b in pairs), name
        assert not part.floats, name
        assert part.most <= 1, name


LAYERS = {
    "grouped": (lambda a: conv(a, KERNEL[:, :, :2]) + BIAS, IMAGE),
    "dense of rank 3": (lambda a: tf.nn.relu(a @ MATRIX + BIAS), spec(2, 5, 4)),
    "tensordot of any batch": (
        lambda a: tf.tensordot(a, MATRIX, 1) + BIAS,
        spec(None, 5, 4),
    ),
    "einsum to heads": (
        lambda a: tf.einsum("abc,cde->abde", a, weights(4, 2, 3)) + weights(2, 3),
        spec(None, 5, 4),
    ),
    "einsum to heads, a bias for all": (
        lambda a: tf.nn.relu(
            tf.einsum("abc,cde->abde", a, weights(4, 2, 3)) + weights(3)
        ),
        spec(2, 5, 4),
    ),
    "einsum to heads without a bias": (
        lambda a: tf.nn.relu(tf.einsum("abc,cde->abde", a, weights(4, 2, 3))),
        spec(None, 5, 4),
    ),
    "einsum of heads": (
        lambda a: tf.einsum("abcd,cde->abe", a, weights(2, 4, 3)) + weights(3),
        spec(None, 5, 2, 4),
    ),
    "heads": (
        lambda a: (
            tf.reshape(tf.reshape(a, [-1, 4]) @ weights(4, 6), [-1, 5, 2, 3])
            + weights(2, 3)
        ),
        spec(None, 5, 4),
    ),
}


def test_layers_are_int8():
    cases = {n: (f, (given,)) for n, (f, given) in LAYERS.items()}
    tables = {"a lookup": tf.constant(TABLE), "of a variable": tf.Variable(2.0 * TABLE)}
    for name, table in tables.items():
        looked_up = lambda a, t=table: tf.nn.embedding_lookup(t, a) @ MATRIX  # noqa: E731
        cases[name] = looked_up, (spec(7, dtype=tf.int32),)
    parts = Together(cases).parts()
    assert {n: p for n, p in parts.items() if not p.is_int8 or p.most > 1} == {}
    for name in tables:
        assert parts[name].kinds == ["GATHER", "FULLY_CONNECTED"]


HANDED_ON = {
    "reshape": lambda y: tf.reshape(y, [1, 256]),
    "transpose": lambda y: tf.transpose(y, [0, 2, 1, 3]),
    "pool and slice": lambda y: tf.nn.max_pool2d(y, 2, 2, "SAME")[:, 1:],
    "pad": lambda y: tf.pad(y, [[0, 0], [1, 1], [1, 1], [0, 0]]),
    "reverse": lambda y: tf.reverse(y, [1]),
    "reverses": lambda y: tf.reshape(tf.reverse(tf.reverse(y, [1]), [2]), [1, 256]),
    "best": lambda y: tf.math.top_k(y, 4)[0],
    "pad with ones": lambda y: tf.pad(
        y, [[0, 0], [1, 1], [0, 0], [0, 0]], constant_values=1.0
    ),
}
SPLIT = {
    "split": lambda y: tf.split(y, 2, -1),
    "uneven": lambda y: tf.split(y, [1, 3], -1),
    "unstack": lambda y: tf.unstack(y, axis=1),
}


def _fixed(y):
    return tf.quantization.fake_quant_with_min_max_args(y, 0.0, 6.0)


def handed_on(hand):
    last = weights(256, 4)

    def function(a):
        y = _fixed(hand(tf.nn.relu6(biased(a))))
        return biased(y, POINT) if y.shape.rank == 4 else y @ last

    return function


def split(parted):
    return lambda a: [3.0 * _fixed(part) for part in parted(tf.nn.relu6(biased(a)))]


def partly_quantized(a):
    y = tf.nn.relu6(biased(a))
    z = _fixed(tf.reshape(y, [1, 16, 16])) * 2.0
    return {"y": y[:, 1:] * 2.0, "z": z}


def all_quantized(a):
    y = tf.nn.relu6(biased(a))
    return [_fixed(hand(y)) for hand in HANDED_ON.values()]


def test_a_fake_quant_is_seen_behind_what_hands_values_on():
    functions = {name: handed_on(hand) for name, hand in HANDED_ON.items()}
    functions |= {name: split(parted) for name, parted in SPLIT.items()}
    functions |= {"partly": partly_quantized, "all": all_quantized}
    cases = {name: (f, (IMAGE,)) for name, f in functions.items()}
    behind_an_input = lambda a: _fixed(tf.reshape(a, [16, 16])) * 2.0  # noqa: E731
    cases["input"] = behind_an_input, (IMAGE,), {"low": 0.0}
    made, wrong = Together(cases), {}
    for name, part in made.parts().items():
        found = made.rounded(name)
        right = ("Relu6" in found) == (name == "partly") and not part.floats
        right &= (name == "input") == ("Placeholder" not in found)
        if name in SPLIT | HANDED_ON | {"input": None}:
            right &= part.is_int8 and part.most <= 1
        if not right:
            wrong[name] = found, part
    assert wrong == {}


def test_a_fake_quant_is_seen_before_weights_that_are_turned():
    def function(a):
        turned = tf.transpose(tf.reshape(MATRIX.T, [4, 4, 1, 1]), [2, 3, 1, 0])
        given = tf.quantization.fake_quant_with_min_max_args(turned, -2.0, 2.0)
        return conv(a, tf.transpose(given, [0, 1, 3, 2]))

    m = opened(function, IMAGE)
    quantize(m, is_training=False)
    assert not [name for name in names(m) if "weights_quant" in name]


def test_inputs_and_outputs_are_quantized_around_what_has_no_kernel():
    function = lambda a, b: {"y": tf.sin(a), "z": tf.cos(b) + a}  # noqa: E731
    made = Together({"two": (function, (IMAGE, IMAGE))})
    assert made.rounded("two").count("Placeholder") == 2
    assert all(is_simulated(t.op) for t in made.model.outputs.values())
    assert {entry.op_type for entry in made.report.skipped} == {"Sin", "Cos"}
    assert made.part().most <= 1


def test_a_number_that_is_an_index_is_no_input():
    m = opened(lambda a: tf.gather(TABLE, tf.cast(a, tf.int32)) @ MATRIX, spec(5))
    report = quantize(m, is_training=False)
    assert "Placeholder" not in {entry.op_type for entry in report.quantized}


def test_overrides():
    def function(a):
        y = tf.nn.relu(biased(a, name="first"), name="relu")
        return biased(biased(y, name="second"), POINT, name="third")

    m = opened(function, IMAGE)
    overrides = {
        # Of one kernel, so they are taken together.
        "first": Spec(weight_bits=5),
        "relu": Spec(activation_bits=6),
        "second": "skip",
        "third": Spec(weight_bits=4, range=(-8.0, 8.0)),
    }
    report = quantize(m, is_training=False, overrides=overrides)
    entries = {entry.op: entry for entry in report.quantized}
    assert entries["third"].weights.bits == 4
    assert entries["third"].result_range == ""
    assert entries["first"].weights.bits == 5
    assert entries["first"].result.bits == 6
    # What reads an input says nothing of the input's own range.
    assert entries["a"].result.bits == 8
    skipped = {entry.op: entry.reason for entry in report.skipped}
    assert skipped["second"] == "is skipped by an override"
    assert report.coverage < 1.0
    with pytest.raises(QuantizeError, match="second"):
        quantize(
            opened(function, IMAGE),
            is_training=False,
            overrides={"second": "skip"},
            strict=True,
        )


def test_an_override_for_a_negation_follows_it_into_a_product():
    for find in (lambda graph: "^turned$", lambda g: g.get_operation_by_name("turned")):
        m = opened(lambda a: tf.negative(biased(a), name="turned"), IMAGE)
        overrides = {find(m.graph): Spec(activation_bits=5)}
        report = quantize(m, is_training=False, overrides=overrides)
        (entry,) = [e for e in report.quantized if e.op.startswith("turned/")]
        assert entry.result.bits == 5


def _ended(end):
    """Return a graph of version 1, whose results nobody names."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 4])
        y = tf.matmul(x, MATRIX, name="logits")
        end(x, tf.multiply(y, [1.0, 2.0, 3.0, 4.0], name="scaled"))
    return graph


def _labels():
    return tf.compat.v1.placeholder(tf.float32, [None, 4])


ENDS = {
    "result": (lambda x, y: tf.nn.softmax(y, name="shares"), 1 / 2),
    "class": (lambda x, y: tf.argmax(tf.nn.softmax(y), 1), 1 / 2),
    "norm": (lambda x, y: y / tf.cast(tf.shape(y)[0], tf.float32), 1 / 2),
    "loss": (lambda x, y: tf.reduce_mean(tf.square(y)), 1.0),
    "labels": (lambda x, y: y - _labels(), 1.0),
    "copy": (lambda x, y: tf.reduce_sum((y - x) ** 2), 1.0),
}


@pytest.mark.parametrize("end", ENDS)
def test_what_is_left_behind_the_last_layer_counts_unless_it_is_a_loss(end):
    function, coverage = ENDS[end]
    report = quantize(_ended(function), is_training=False)
    (entry,) = [e for e in report.skipped if e.op == "scaled"]
    assert "behind the last layer" in entry.reason
    assert "override" in entry.reason
    assert entry.has_kernel == (coverage < 1.0)
    assert report.coverage == pytest.approx(coverage)


def test_overrides_behind_the_last_layer_are_obeyed():
    graph = _ended(lambda x, y: tf.nn.softmax(y, name="shares"))
    overrides = {"scaled": Spec(range=(-4.0, 4.0)), "shares": Spec()}
    report = quantize(graph, is_training=False, overrides=overrides, strict=True)
    entries = {entry.op: entry for entry in report.quantized}
    assert entries["scaled"].result_range == ""
    assert report.coverage == 1.0
    (made,) = graph.get_operation_by_name("shares").outputs
    assert is_simulated(report.tensor(made).op)
    assert is_simulated(made.op.inputs[0].op)


def loops(a):
    return tf.while_loop(
        lambda i, x: i < 2,
        lambda i, x: (i + 1, tf.nn.relu(conv(x))),
        (0, a),
        parallel_iterations=1,
    )[1]


def rectified(x):
    return tf.nn.relu(x)


def lists(a):
    """Return what a loop makes row by row, which it keeps in a list."""
    return tf.map_fn(lambda x: tf.nn.relu(x[None] @ MATRIX)[0], a[0, 0]) @ MATRIX


BODIES = {
    "While": loops,
    "If": lambda a: tf.cond(tf.reduce_sum(a) > 0, lambda: conv(a), lambda: a),
    "Call": tf.function(lambda a: tf.nn.relu(conv(a)), autograph=False),
    "rectified": lambda a: conv(
        Defun(tf.float32, func_name="rectified")(rectified)(conv(a))
    ),
}


def check_told(m, kind, *reasons):
    report = quantize(m, is_training=False)
    ge.verify(m.graph)
    (entry,) = [e for e in report.skipped if kind in e.op_type]
    assert all(reason in entry.reason for reason in reasons)
    assert report.coverage < 1.0
    return entry


@pytest.mark.parametrize("body", BODIES)
def test_bodies_are_reported_with_the_remedy(body):
    traced = tf.function(
        BODIES[body],
        input_signature=[tf.TensorSpec(IMAGE.shape, name="a")],
        autograph=False,
    )
    m = model.open(traced, inline=False)
    check_told(m, body, "not looked into", "geutil.model.open")


def test_a_loop_that_returns_lists_is_reported():
    check_told(opened(lists, IMAGE), "While")
    moved = opened(lambda a: tf.map_fn(lambda row: row[::-1], a), spec(3, 4))
    report = quantize(moved, is_training=False)
    assert not [e for e in report.skipped if "While" in e.op_type]


STAYING = {
    "XLA compiles it as a whole": {"jit_compile": True},
    "it is marked to stay a call": {"experimental_attributes": {"_noinline": True}},
}


@pytest.mark.parametrize("reason", STAYING)
def test_calls_that_stay_in_an_opened_model_are_not_said_to_be_inlined(reason):
    kept = tf.function(lambda a: tf.nn.relu(biased(a)), **STAYING[reason])
    m = opened(kept, IMAGE)
    (kept,) = m.kept_calls
    entry = check_told(m, "Call", reason, kept.reason)
    assert "inlines it" not in entry.reason


# -- concats: what they read and make has one range ------------------------------------


def learnt(x, features=4):
    return conv(x, 0.6 * weights(3, 3, x.shape[-1], features))


def ranges_of(m, kinds, is_of=lambda name: True):
    """Return the ranges of the results of some types of ops, as tensors' names."""
    simulated = [op for op in m.graph.get_operations() if is_simulated(op)]
    read = [op for op in simulated if op.inputs[0].op.type in kinds and is_of(op.name)]
    return {op.inputs[1].op.inputs[0].name for op in read}


def dense_block(a):
    x = a
    for _ in range(3):
        x = tf.concat([x, tf.nn.relu(learnt(x))], 3)
    return x


def pooled(pool):
    def function(a):
        y = tf.nn.relu(learnt(a))
        return tf.concat([pool(y, 3, 1, "SAME"), tf.nn.relu(learnt(y))], 3)

    return function


def moved(a):
    y, z = tf.nn.relu(learnt(a)), tf.nn.relu(learnt(a))
    return tf.concat([tf.transpose(y, [0, 2, 1, 3]), z], 3)


CONCATS = {
    "two": lambda a: tf.concat([tf.nn.relu(learnt(a)), tf.nn.relu6(learnt(a))], 3),
    "nested": dense_block,
    "max pooled": pooled(tf.nn.max_pool2d),
    "average pooled": pooled(tf.nn.avg_pool2d),
    "moved": moved,
    "with an input": lambda a: tf.concat([a, tf.nn.relu(learnt(a))], 3),
    "the same twice": lambda a: tf.concat([a, a], 3),
    "stacked": lambda a: tf.stack([tf.nn.relu(learnt(a)), a], 3),
}


def test_one_range_for_all():
    fixed = {"fixed": lambda a: tf.concat([tf.nn.softmax(a), learnt(a)], 3)}
    made = Together({n: (f, (IMAGE,)) for n, f in (CONCATS | fixed).items()})
    wrong = {}
    for kind, part in made.parts().items():
        if kind == "fixed":
            # It is converted where it is joined.
            right = "QUANTIZE" in part.kinds and part.most <= 1
        else:
            joined = {"ConcatV2", "Pack", "Relu", "Relu6", "AvgPool"}
            if kind in {"with an input", "the same twice", "stacked", "nested"}:
                joined.add("Placeholder")
            found = ranges_of(
                made.model, joined, lambda name, kind=kind: made.is_of(name, kind)
            )
            alone = kind in {"max pooled", "average pooled", "moved"}
            # An activation that nothing joins has a range of its own.
            right = len(found) == 1 or (alone and len(found) <= 2)
            right &= "QUANTIZE" not in part.kinds and part.most <= 2
        if not right or not part.is_int8:
            wrong[kind] = part
    assert wrong == {}


def test_what_is_skipped_is_joined_all_the_same():
    def function(a):
        left = tf.nn.conv2d(a, np.ones((1, 1, 4, 4), np.float32), 1, "SAME", name="l")
        return tf.concat([left, tf.nn.relu(learnt(a))], 3)

    m = opened(function, IMAGE)
    report = quantize(m, is_training=False, overrides={"^l$": "skip"})
    assert [entry.op for entry in report.skipped] == ["l"]
    (concat,) = [op for op in m.graph.get_operations() if op.type == "ConcatV2"]
    assert all(is_simulated(t.op) for t in concat.inputs[:2])
    assert len(ranges_of(m, {"Conv2D", "Relu", "ConcatV2"})) == 1
