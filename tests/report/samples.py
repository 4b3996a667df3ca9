"""What the pages of the tests draw."""

import itertools
import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

import geutil as ge
from geutil import memory, model, report
from geutil.batchnorm import fold_batch_norms
from geutil.gradients import gradients, last_report
from geutil.quantize import quantize
from tests import tflite_files

MB = 1_000_000
NOISE_BANDS = (
    "below 10 dB",
    "10 to 20 dB",
    "20 to 30 dB",
    "30 to 40 dB",
    "40 dB and more",
    "exact",
    "all zeros",
)
"""The words of pages for signal-to-noise ratios, in the order of their colours."""


def noise_band(layer):
    """Return the place of a layer's own noise in `NOISE_BANDS`."""
    if layer.worst.own == math.inf:
        return NOISE_BANDS.index("all zeros" if layer.silent else "exact")
    return bisect_right([10, 20, 30, 40], layer.worst.own)


def table_of(result):
    """Return a report as a page has it."""
    with tf.Graph().as_default() as graph:
        tf.constant(1.0)
    return report.view(graph, report=result).payload["report"]


@dataclass(frozen=True)
class Edited:
    """A model before and after an edit, and what the edit reported."""

    before: Any
    after: Any
    report: Any


def folded():
    after = model.open(tflite_files.network())
    report = fold_batch_norms(after)
    return Edited(model.open(tflite_files.network()), after, report)


def quantized():
    before, after = (model.open(tflite_files.network()) for _ in range(2))
    fold_batch_norms(before)
    fold_batch_norms(after)
    report = quantize(after, is_training=False, overrides={"head": "skip"})
    return Edited(before, after, report)


@tf.function
def _called(x):
    return tf.nn.relu(x, name="in_called") + 1.0


@tf.function(input_signature=tflite_files.FLOWS)
def _flow(x, n):
    return {"y": _called(tflite_files.flowing(x, n))}


def flow():
    """Return a model that loops, branches and calls."""
    return model.open(_flow, inline=False)


def squash(model):
    """Put a tanh in the place of the relu in a model's loop; return the body's name."""
    name = next(name for name in model.functions if "body" in name)
    graph = model.functions[name].graph
    (relu,) = (op.outputs[0] for op in graph.get_operations() if op.type == "Relu")
    with graph.as_default():
        ge.reroute_ts(tf.tanh(relu.op.inputs[0], name="squashed"), relu)
    return name


def marked_up(text):
    """Return a page with a text wherever one may come from outside."""
    with tf.Graph().as_default() as graph:
        tf.constant(text, name="text")
    labels = (text, "after")
    told = f"{text}\n{text}"
    return report.diff(graph, tf.Graph(), title=text, labels=labels, report=told)


def timeline(sizes, held=()):
    """Return a timeline of ops with sizes in MB."""
    moments = [memory.Moment(f"op{i}", s * MB, "forward") for i, s in enumerate(sizes)]
    return memory.Timeline(tuple(moments), tuple(held), 0, 0, "predicted")


def wired(nodes):
    """Return a graph of float ops, each given by its type, its name and its inputs."""
    definition = tf.compat.v1.GraphDef()
    for kind, name, *inputs in nodes:
        node = definition.node.add(op=kind, name=name, input=inputs)
        attribute = node.attr["T" if inputs else "dtype"]
        attribute.type = tf.float32.as_datatype_enum
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(definition, name="")
    return graph


def skipping():
    """Return a graph in which an edge must go around three ops."""
    chain = ["x", "first", "second", "third"]
    tanhs = [("Tanh", name, read) for read, name in itertools.pairwise(chain)]
    return wired([("Placeholder", "x"), *tanhs, ("AddV2", "joined", "x", "third")])


def nested():
    """Return a graph of scopes in scopes, and of ops in them."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 3], name="x")
        with tf.name_scope("outer"):
            with tf.name_scope("left"), tf.device("/CPU:0"):
                left = tf.nn.relu(tf.matmul(x, tf.ones([3, 4]), name="product"))
            with tf.name_scope("right"):
                right = tf.tanh(left, name="tanh")
        ready = tf.no_op(name="ready")
        with tf.control_dependencies([ready]):
            tf.add(left, right, name="joined")
    return graph


def swapped():
    """Return `nested` with an op replaced, one rewired, and one added."""
    graph = nested()
    with graph.as_default(), tf.name_scope("outer/right/"):
        sigmoid = tf.sigmoid(graph.get_tensor_by_name("outer/left/Relu:0"), name="soft")
    ge.reroute_ts(sigmoid, graph.get_tensor_by_name("outer/right/tanh:0"))
    return graph


def without_tanh():
    """Return what `nested` would be without one op."""
    definition = swapped().as_graph_def()
    kept = [node for node in definition.node if node.name != "outer/right/tanh"]
    del definition.node[:]
    definition.node.extend(kept)
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(definition, name="")
    return graph


@dataclass(frozen=True)
class Steps:
    """A training step, plain and with checkpoints."""

    plain: memory.Timeline
    saving: memory.Timeline
    report: Any


def steps():
    plain, _ = _step(None)
    saving, report = _step("memory")
    return Steps(plain, saving, report)


def training_graph(checkpoints):
    """Return the graph of a training step of eight layers."""
    return _traced(checkpoints).graph


def _traced(checkpoints):
    weights = [tf.Variable(tf.eye(32), name=f"weight{i}") for i in range(8)]

    @tf.function(autograph=False)
    def step(x):
        for weight in weights:
            x = tf.tanh(tf.matmul(x, weight))
        loss = tf.reduce_mean(x)
        if checkpoints is None:
            grads = tf.gradients(loss, weights)
        else:
            grads = gradients(loss, weights, checkpoints=checkpoints)
        for weight, gradient in zip(weights, grads, strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    return step.get_concrete_function(tf.TensorSpec([512, 32]))


def _step(checkpoints):
    traced = _traced(checkpoints)
    ops = traced.graph.get_operations()
    updates = [op for op in ops if op.type.startswith("Assign")]
    timeline = memory.predict([*updates, *traced.outputs])
    return timeline, None if checkpoints is None else last_report()
