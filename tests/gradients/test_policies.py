"""Policies and their combinators."""

import gc
import pickle
import re

import pytest
import tensorflow as tf

import geutil as ge
from geutil.gradients import (
    all_of,
    any_of,
    by_name,
    by_type,
    gradients,
    inside,
    larger_than,
    last_report,
    not_,
)


@pytest.fixture(scope="module")
def tensors():
    """Tensors by the name of their op."""
    with tf.Graph().as_default() as graph:
        for scope in ("stereo/block1", "stereo/block2/BatchNorm", "motion"):
            with tf.name_scope(scope):
                x = tf.zeros([1, 4, 4, 2], name="x")
                y = tf.nn.conv2d(x, tf.zeros([1, 1, 2, 2]), 1, "SAME", name="conv")
                tf.add(x, y, name="add")
        tf.zeros([4], name="alone")
        tf.compat.v1.placeholder(tf.float32, [None, 4], name="batch")
        tf.compat.v1.placeholder(tf.float32, None, name="unknown")
        return {op.name: op.outputs[0] for op in graph.get_operations() if op.outputs}


def kept(policy, tensors):
    names = ("x", "conv", "add", "alone", "batch", "unknown")
    return {
        name
        for name, t in tensors.items()
        if name.rpartition("/")[2] in names and policy(t)
    }


IN_STEREO = {
    f"stereo/{block}/{name}"
    for block in ("block1", "block2/BatchNorm")
    for name in ("x", "conv", "add")
}
ADDS = {"stereo/block1/add", "stereo/block2/BatchNorm/add", "motion/add"}
CONVOLUTIONS = {name.replace("add", "conv") for name in ADDS}
IMAGES = ADDS | CONVOLUTIONS | {name.replace("add", "x") for name in ADDS}

POLICIES = [
    (by_name("block[0-9]/add$"), {"stereo/block1/add"}),
    (by_name(re.compile("ADD", re.IGNORECASE)), ADDS),
    (by_name("^alone$"), {"alone"}),
    (by_type("AddV2"), ADDS),
    (by_type("AddV2", "Conv2D"), ADDS | CONVOLUTIONS),
    (by_type("Relu"), set()),
    (inside("stereo"), IN_STEREO),
    (inside("stereo/"), IN_STEREO),
    (inside("/BatchNorm/"), {n for n in IN_STEREO if "BatchNorm" in n}),
    (inside("Batch"), set()),
    (inside("stereo/block1/add"), set()),
    (larger_than(15), IMAGES | {"alone", "batch"}),
    (larger_than(127), IMAGES | {"batch"}),
    (larger_than(128), {"batch"}),
    # 32 rows of 4 floats.
    (larger_than(511), {"batch"}),
    (larger_than(512), set()),
    (any_of(), set()),
    (all_of(by_type("AddV2"), inside("motion")), {"motion/add"}),
    (
        any_of(by_name("^alone$"), inside("motion")),
        {"alone", "motion/x", "motion/conv", "motion/add"},
    ),
    (all_of(by_type("AddV2"), not_(inside("stereo"))), {"motion/add"}),
    (
        all_of(
            any_of(
                all_of(inside("stereo"), by_type("Add", "AddV2")),
                all_of(inside("motion"), by_type("Conv2D")),
            ),
            not_(by_name("BatchNorm")),
        ),
        {"stereo/block1/add", "motion/conv"},
    ),
    (any_of(lambda t: t.shape.rank == 1), {"alone"}),
]


def test_what_is_kept(tensors):
    everything = kept(all_of(), tensors)
    wrong = {}
    for policy, expected in POLICIES:
        found = kept(policy, tensors), kept(not_(policy), tensors)
        if found != (expected, everything - expected):
            wrong[str(policy)] = found
    assert wrong == {}


class Mine:
    def __call__(self, tensor):
        return tensor.op.type == "Sin"


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (
            all_of(any_of(inside("a"), by_type("Sin")), not_(larger_than(3000))),
            "all_of(any_of(inside('a'), by_type('Sin')), not_(larger_than(3000)))",
        ),
        (not_(by_type("Exp")), "not_(by_type('Exp'))"),
        (lambda t: t.op.type == "Sin", "<lambda>"),
        (Mine(), "Mine"),
    ],
)
def test_the_report_names_the_policy(policy, name, graph):
    x = tf.ones([64])
    y = tf.sin(tf.exp(tf.sin(x)))
    gradients(tf.sin(tf.exp(y)), x, checkpoints=policy)
    assert last_report().mode == name
    if not isinstance(policy, Mine) and name != "<lambda>":
        assert str(policy) == name


def test_errors_of_a_policy_come_through(graph):
    y = tf.sin(tf.exp(tf.sin(x := tf.ones([64]))))
    with pytest.raises(ZeroDivisionError):
        gradients(y, x, checkpoints=lambda t: 1 / 0, min_checkpoint_size=0)


def test_types_are_strings():
    for types in [(), (3,), ("Conv2D", None), (["Conv2D"],)]:
        with pytest.raises(ge.ArgumentTypeError, match="type"):
            by_type(*types)


def test_the_collector_waits_while_a_step_is_planned(graph):
    seen = []

    def policy(tensor):
        seen.append(gc.isenabled())
        return tensor.op.type == "Tanh"

    x = tf.ones([4])
    y = tf.exp(tf.tanh(tf.exp(x)))
    gradients(y, x, checkpoints=policy, min_checkpoint_size=0)
    assert seen and not any(seen)
    assert gc.isenabled()
    gc.disable()
    try:
        gradients(y, x, checkpoints=policy, min_checkpoint_size=0)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_report_can_be_pickled_with_its_plans(graph):
    """A plan that nobody has asked for is made where it was sent to."""
    x = tf.ones([4, 300])
    y = x
    for _ in range(6):
        y = tf.tanh(y)
    gradients(y, x, checkpoints="memory", order=False)
    report = last_report()
    sent = pickle.loads(pickle.dumps(report))
    assert sent == report
    assert sent.plan.peak == report.plan.peak == report.peak
    assert sent.plan.dependencies == report.plan.dependencies
    assert sent.plain_plan.peak == report.plain_plan.peak == report.plain_peak
