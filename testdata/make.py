"""Makes the graphs and SavedModels of this folder: `python -m testdata.make`.

The graphs come out the same each time: weights are seeded, and what TensorFlow numbers
by process (function names) or by release (versions) is replaced by something fixed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from google.protobuf import text_format
from tensorflow.core.protobuf import control_flow_pb2, saved_model_pb2

tf1 = tf.compat.v1
HERE = Path(__file__).resolve().parent

# The graph version of the oldest TensorFlow we support, so that it reads the files.
PRODUCER = 1766


def conv_bn_relu6() -> tf1.GraphDef:
    """Two blocks of convolution, batch norm and Relu6, as freezing leaves them.

    The first is Conv2D, the second depthwise. Image `image`, result `logits`.
    """
    rng = np.random.RandomState(1)
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [None, 8, 8, 3], name="image")
        with tf1.name_scope("conv"):
            weights = _constant(rng.normal(0, 0.4, (3, 3, 3, 4)), "weights")
            x = tf.nn.conv2d(x, weights, 2, "SAME", name="Conv2D")
            x = _batch_norm_and_relu6(x, rng)
        with tf1.name_scope("depthwise"):
            weights = _constant(rng.normal(0, 0.4, (3, 3, 4, 1)), "weights")
            x = tf1.nn.depthwise_conv2d_native(
                x, weights, [1, 1, 1, 1], "SAME", name="depthwise"
            )
            x = _batch_norm_and_relu6(x, rng)
        with tf1.name_scope("head"):
            x = tf1.reduce_mean(x, [1, 2], name="pool")
            x = tf.matmul(x, _constant(rng.normal(0, 1, (4, 5)), "weights"))
            bias = _constant(rng.normal(0, 1, 5), "bias")
            x = tf.nn.bias_add(x, bias)
        tf.identity(x, "logits")
    return _graph_def(graph)


def while_v1() -> tf1.MetaGraphDef:
    """A loop of Enter, Merge, Switch, NextIteration and Exit.

    `power` is `x` doubled `count` times; `sum` is `x` plus all the powers on the way.
    """
    with _control_flow(v2=False), tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [2], name="x")
        count = tf1.placeholder(tf.int32, [], name="count")
        two = tf.constant(2.0, name="two")

        def body(i: Any, power: Any, total: Any) -> Any:
            power = power * two
            return i + 1, power, total + power

        _, power, total = tf1.while_loop(
            lambda i, *_: i < count, body, [tf.constant(0), x, x], name="loop"
        )
        tf.identity(power, "power")
        tf.identity(total, "sum")
    return _meta_graph(graph)


def cond_v1() -> tf1.GraphDef:
    """A choice of Switch and Merge: `y` is `3x` if `flag`, else `x - 1`."""
    with _control_flow(v2=False), tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [2], name="x")
        flag = tf1.placeholder(tf.bool, [], name="flag")
        y = tf1.cond(flag, lambda: x * 3.0, lambda: x - 1.0, name="choice")
        tf.identity(y, "y")
    return _graph_def(graph)


def functions() -> tf1.GraphDef:
    """A PartitionedCall, and a functional While whose body calls the same function.

    `scaled` is `0.5x + 1`; `repeated` does that `count` times.
    """
    with _control_flow(v2=True), tf.Graph().as_default() as graph:
        x = tf1.placeholder(tf.float32, [2], name="x")
        count = tf1.placeholder(tf.int32, [], name="count")

        @tf.function(autograph=False, input_signature=[tf.TensorSpec([2])])
        def scale(value: Any) -> Any:
            return value * 0.5 + 1.0

        tf.identity(scale(x), "scaled")
        _, repeated = tf.while_loop(
            lambda i, _: i < count,
            lambda i, value: (i + 1, scale(value)),
            [tf.constant(0), x],
            name="loop",
        )
        tf.identity(repeated, "repeated")
    return _graph_def(graph)


def devices() -> tf1.GraphDef:
    """Devices of another machine, colocation and control inputs; cannot be run."""
    with tf.Graph().as_default() as graph:
        with tf.device("/job:ps/task:0/device:CPU:0"):
            weights = tf.constant([[1.0, 2.0], [3.0, 4.0]], name="weights")
        with tf.device("/job:worker/task:1/device:GPU:0"):
            x = tf1.placeholder(tf.float32, [None, 2], name="x")
            product = tf.matmul(x, weights, name="product")
        with graph.colocate_with(weights.op):
            norm = tf.reduce_sum(weights * weights, name="norm")
        checked = tf.debugging.check_numerics(norm, "norm", name="norm_is_finite")
        with tf.control_dependencies([checked.op, product.op]):
            tf.divide(product, norm, name="result")
            tf.no_op(name="done")
    return _graph_def(graph)


def one_signature() -> tuple[tf.Module, dict[str, Any]]:
    """`serving_default`: `y = x @ weight`."""
    module = tf.Module()
    module.weight = _variable((3, 2), seed=2)

    @tf.function(input_signature=[tf.TensorSpec([None, 3], name="x")])
    def multiply(x: Any) -> Any:
        return {"y": tf.matmul(x, module.weight)}

    module.multiply = multiply
    return module, {"serving_default": multiply}


def two_signatures() -> tuple[tf.Module, dict[str, Any]]:
    """`encode`: `code = x @ weight`; `decode`: `x = code @ transpose(weight)`."""
    module = tf.Module()
    module.weight = _variable((3, 2), seed=3)

    @tf.function(input_signature=[tf.TensorSpec([None, 3], name="x")])
    def encode(x: Any) -> Any:
        return {"code": tf.matmul(x, module.weight)}

    @tf.function(input_signature=[tf.TensorSpec([None, 2], name="code")])
    def decode(code: Any) -> Any:
        return {"x": tf.matmul(code, module.weight, transpose_b=True)}

    module.encode, module.decode = encode, decode
    return module, {"encode": encode, "decode": decode}


GRAPHS: dict[str, Callable[[], Any]] = {
    "conv_bn_relu6.pbtxt": conv_bn_relu6,
    "while_v1.pbtxt": lambda: while_v1().graph_def,
    "while_v1.meta.pbtxt": while_v1,
    "cond_v1.pbtxt": cond_v1,
    "functions.pbtxt": functions,
    "devices.pbtxt": devices,
}
SAVED_MODELS: dict[str, Callable[[], tuple[tf.Module, dict[str, Any]]]] = {
    "one_signature": one_signature,
    "two_signatures": two_signatures,
}


def main() -> None:
    """Write every file of this folder anew."""
    for name, make_graph in GRAPHS.items():
        (HERE / name).write_text(text_format.MessageToString(make_graph()))
    for name, make_model in SAVED_MODELS.items():
        _save(*make_model(), HERE / name)


def _constant(value: Any, name: str) -> tf.Tensor:
    return tf.constant(np.asarray(value, np.float32), name=name)


def _variable(shape: tuple[int, ...], seed: int) -> tf.Variable:
    value = np.random.RandomState(seed).normal(0, 1, shape).astype(np.float32)
    return tf.Variable(value, name="weight")


def _batch_norm_and_relu6(x: tf.Tensor, rng: np.random.RandomState) -> tf.Tensor:
    depth = x.shape[-1]
    with tf1.name_scope("batch_norm"):
        x, _, _ = tf1.nn.fused_batch_norm(
            x,
            _constant(rng.uniform(0.5, 1.5, depth), "gamma"),
            _constant(rng.normal(0.5, 0.5, depth), "beta"),
            _constant(rng.normal(0, 0.5, depth), "moving_mean"),
            _constant(rng.uniform(0.5, 2.0, depth), "moving_variance"),
            epsilon=1e-3,
            is_training=False,
            name="FusedBatchNorm",
        )
    return tf.nn.relu6(x, name="Relu6")


@contextmanager
def _control_flow(v2: bool) -> Iterator[None]:
    """Build loops and conditionals one way or the other, for a while."""
    before = tf1.control_flow_v2_enabled()
    (tf1.enable_control_flow_v2 if v2 else tf1.disable_control_flow_v2)()
    try:
        yield
    finally:
        (tf1.enable_control_flow_v2 if before else tf1.disable_control_flow_v2)()


def _graph_def(graph: tf.Graph) -> tf1.GraphDef:
    return _meta_graph(graph).graph_def


def _meta_graph(graph: tf.Graph) -> tf1.MetaGraphDef:
    # Without the attributes that hold their defaults, older releases can read it.
    with graph.as_default():
        meta_graph = tf1.train.export_meta_graph(strip_default_attrs=True)
    info = meta_graph.meta_info_def
    info.ClearField("tensorflow_version")
    info.ClearField("tensorflow_git_version")
    # The op definitions with all their arguments; import does without them.
    info.ClearField("stripped_op_list")
    graph_def = meta_graph.graph_def
    graph_def.versions.Clear()
    graph_def.versions.producer = PRODUCER
    _settle_functions(graph_def)
    _settle_contexts(meta_graph)
    return meta_graph


def _settle_contexts(meta_graph: tf1.MetaGraphDef) -> None:
    """Write the maps inside the stored contexts in a fixed order."""
    messages = {
        tf1.GraphKeys.WHILE_CONTEXT: control_flow_pb2.WhileContextDef,
        tf1.GraphKeys.COND_CONTEXT: control_flow_pb2.CondContextDef,
    }
    for key, message in messages.items():
        if key in meta_graph.collection_def:
            values = meta_graph.collection_def[key].bytes_list.value
            values[:] = [
                message.FromString(value).SerializeToString(deterministic=True)
                for value in values
            ]


def _settle_functions(graph_def: tf1.GraphDef) -> None:
    """Name and order the functions by their first use instead of by a counter."""
    by_name = {f.signature.name: f for f in graph_def.library.function}
    used: dict[str, str] = {}
    _note_calls(graph_def.node, used)
    # `used` grows under the loop: a function's own calls come after those before.
    for name in (pending := list(used)):
        nodes = by_name[name].node_def
        known = len(used)
        _note_calls(nodes, used)
        pending.extend(list(used)[known:])
        by_name[name].signature.name = used[name]
    for nodes in (graph_def.node, *(by_name[name].node_def for name in used)):
        for function in _calls(nodes):
            function.name = used[function.name]
        for node in nodes:
            # Names a gradient in the registry of the process that built the graph.
            node.attr.pop("_gradient_op_type", None)
            # Holds the number of devices of the machine.
            if "config_proto" in node.attr:
                node.attr["config_proto"].s = b""
    settled = [by_name[name] for name in used]
    del graph_def.library.function[:]
    graph_def.library.function.extend(settled)


def _note_calls(nodes: Iterable[Any], used: dict[str, str]) -> None:
    for function in _calls(nodes):
        plain = re.sub(r"^__inference_|(_\d+)+$", "", function.name)
        if function.name not in used:
            assert plain not in used.values(), f"two functions are named '{plain}'"
            used[function.name] = plain


def _calls(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yield the attribute values that name functions, in the order of the nodes."""
    for node in nodes:
        for _, attr in sorted(node.attr.items()):
            if attr.HasField("func"):
                yield attr.func
            yield from attr.list.func


def _save(module: tf.Module, signatures: dict[str, Any], folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    options = tf.saved_model.SaveOptions(experimental_debug_stripper=True)
    tf.saved_model.save(module, str(folder), signatures, options)
    # Holds a random identifier. Nothing needs it for loading.
    (folder / "fingerprint.pb").unlink(missing_ok=True)
    (folder / "assets").rmdir()
    file = folder / "saved_model.pb"
    saved_model = saved_model_pb2.SavedModel.FromString(file.read_bytes())
    file.write_bytes(saved_model.SerializeToString(deterministic=True))


if __name__ == "__main__":
    main()
