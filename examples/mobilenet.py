"""Surgery on Keras MobileNetV2: list, cut, replace, copy, pin, and check by running.

Run it with `make demo`. It uses nothing but the public API of geutil. Weights and
batch-norm statistics are random but fixed, so that the numbers mean something without a
download: every check compares what two graphs compute.
"""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter
from dataclasses import dataclass, field

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import geutil as ge

IMAGE = (96, 96, 3)
BATCH = 2
CLOSE = 1e-5
"""Largest difference, relative to the largest value, that counts as agreement."""


@dataclass
class Checks:
    """What was compared, and how it came out."""

    held: list[bool] = field(default_factory=list)

    def compare(self, what: str, a: np.ndarray, b: np.ndarray, *, agree: bool) -> None:
        """Print the largest difference between two results and whether it should be."""
        difference = float(np.max(np.abs(a - b)))
        close = difference <= CLOSE * max(1.0, float(np.max(np.abs(a))))
        self.note(
            f"{what}: largest difference {difference:.2e}, "
            f"must {'agree' if agree else 'differ'}",
            close == agree,
        )

    def note(self, what: str, holds: bool) -> None:
        """Print a statement and whether it holds."""
        self.held.append(holds)
        print(f"  [{'ok' if holds else 'FAILED'}] {what}")


@dataclass(frozen=True)
class Network:
    """A frozen network in a `tf.Graph`."""

    graph: tf.Graph
    image: tf.Tensor
    output: tf.Tensor

    def run(self, tensors: list[tf.Tensor], feed: dict) -> list[np.ndarray]:
        """Run the graph in a Session of its own."""
        with tf.compat.v1.Session(graph=self.graph) as session:
            return session.run(tensors, feed)

    def copy(self) -> Network:
        """Return the same network in a graph of its own."""
        _, info = ge.copy(self.graph, tf.Graph())
        image, output = info.transformed([self.image, self.output])
        return Network(image.graph, image, output)


def keras_model() -> tf.keras.Model:
    """Build MobileNetV2 with random weights and random batch-norm statistics."""
    tf.keras.utils.set_random_seed(0)
    model = tf.keras.applications.MobileNetV2(weights=None, input_shape=IMAGE)
    random = np.random.default_rng(0)
    for layer in model.layers:
        if isinstance(layer, tf.keras.layers.BatchNormalization):
            size = layer.moving_mean.shape
            layer.set_weights(
                [
                    random.uniform(1.0, 3.0, size),
                    random.normal(0.5, 1.0, size),
                    random.normal(0.0, 0.1, size),
                    random.uniform(0.05, 0.5, size),
                ]
            )
    return model


def traced_network(model: tf.keras.Model) -> Network:
    """Trace the model and copy it into a `tf.Graph`, variables turned to constants."""
    function = tf.function(lambda x: model(x, training=False)).get_concrete_function(
        tf.TensorSpec((BATCH, *IMAGE), name="image")
    )
    values = {id(v.handle): v.numpy() for v in function.variables}
    captured = function.inputs[len(function.inputs) - len(function.captured_inputs) :]
    handles = {
        id(inside): values[id(outside)]
        for outside, inside in zip(function.captured_inputs, captured, strict=True)
    }
    reads = ge.filter_ops(function.graph, ge.op_type("ReadVariableOp"))
    graph = tf.Graph()
    with graph.as_default():
        image = tf.compat.v1.placeholder(tf.float32, (BATCH, *IMAGE), name="image")
        replacements = [(function.inputs[0], image)]
        for read in reads:
            value = tf.constant(handles[id(read.inputs[0])], name=read.name)
            replacements.append((read.outputs[0], value))
    ops = ge.get_backward_walk_ops(
        function.outputs, stop_at_ts=[t for t, _ in replacements]
    )
    _, info = ge.copy_with_input_replacements(ops, replacements, dst_graph=graph)
    return Network(graph, image, info.transformed(function.outputs[0]))


def show(graph: tf.Graph) -> None:
    """List a graph by name scope and by op type."""
    ops = graph.get_operations()
    print(f"\n1. {len(ops)} ops, by name scope")
    scopes = Counter("/".join(op.name.split("/")[:2]) for op in ops)
    blocks = [(scope, n) for scope, n in scopes.items() if "/" in scope]
    for scope, _ in [*blocks[:4], *blocks[-2:]]:
        types = Counter(op.type for op in ge.get_name_scope_ops(graph, scope))
        print(f"  {scope:38} {dict(types)}")
    print(f"  ... {len(blocks)} scopes in all; by op type")
    print(f"  {dict(Counter(op.type for op in ops).most_common(8))}")


def block_output(graph: tf.Graph, block: str) -> tf.Tensor:
    """Return what a block yields: the output of its residual addition."""
    return ge.select_ops(rf"/{block}_add(_\d+)?/", graph=graph)[-1].outputs[0]


def cut(network: Network, images: np.ndarray, checks: Checks) -> None:
    """Cut the sub-network between two tensors out, into a graph of its own."""
    start = block_output(network.graph, "block_2")
    end = block_output(network.graph, "block_7")
    ops = ge.get_backward_walk_ops(end, stop_at_ts=[start])
    part, info = ge.copy(ge.make_view(ops).remap_outputs([0]), tf.Graph())
    print(f"\n2. cut: {len(part.ops)} ops between '{start.name}' and '{end.name}'")
    at_start, at_end = network.run([start, end], {network.image: images})
    piece = Network(part.graph, info.transformed(start), info.transformed(end))
    (again,) = piece.run([piece.output], {piece.image: at_start})
    checks.compare("the part alone, fed the whole's values", again, at_end, agree=True)


def replace_relu6(network: Network, images: np.ndarray, checks: Checks) -> None:
    """Replace every Relu6 by Relu in a copy."""
    edited = network.copy()
    relu6 = ge.filter_ops(edited.graph, ge.op_type("Relu6"))
    with ge.transaction(edited.graph):
        for op in relu6:
            with edited.graph.as_default():
                relu = tf.nn.relu(op.inputs[0], name=f"{op.name}_unbounded")
            ge.reroute_ts(relu, op.outputs[0])
    ge.verify(edited.graph)
    print(f"\n3. rerouted: {len(relu6)} Relu6 replaced by Relu")
    used = ge.get_backward_walk_ops(edited.output)
    left = len(ge.filter_ops(used, ge.op_type("Relu6")))
    checks.note(f"Relu6 left behind the output: {left}, must be 0", left == 0)
    first = relu6[0].inputs[0].name
    before, after = (
        n.run([n.graph.get_tensor_by_name(first), n.output], {n.image: images})
        for n in (network, edited)
    )
    checks.compare(f"'{first}', ahead of every edit", before[0], after[0], agree=True)
    checks.compare("the output", before[1], after[1], agree=False)


def copy_first_half(network: Network, images: np.ndarray, checks: Checks) -> None:
    """Copy the first half within the same graph, reading a mirrored image."""
    middle = block_output(network.graph, "block_8")
    with network.graph.as_default():
        mirrored = tf.reverse(network.image, axis=[2], name="mirrored")
    copied = ge.graph_replace(middle, {network.image: mirrored}, dst_scope="mirror")
    half = ge.get_name_scope_ops(network.graph, "mirror")
    print(f"\n4. copied: {len(half)} ops up to '{middle.name}', with a new input")
    feed = {network.image: images}
    original, mirror = network.run([middle, copied], feed)
    feed = {network.image: np.ascontiguousarray(images[:, :, ::-1])}
    (expected,) = network.run([middle], feed)
    checks.compare(
        "the copy, against the original fed mirrored", mirror, expected, agree=True
    )
    checks.compare(
        "the copy, against the original fed as before", mirror, original, agree=False
    )


def pin_devices(network: Network, images: np.ndarray, checks: Checks) -> None:
    """Copy with devices pinned, copy the copy, and see the devices again."""
    middle = block_output(network.graph, "block_8")
    first_half = {op.name for op in ge.get_backward_walk_ops(middle)}

    def pin(node_def):
        first = node_def.name in first_half
        node_def.device = f"/job:localhost/task:0/device:CPU:{0 if first else 1}"
        return node_def

    pinned = ge.Transformer()
    pinned.transform_op_handler = functools.partial(ge.copy_op_handler, nodedef_fn=pin)
    view, info = pinned(network.graph, tf.Graph(), "")
    again, _ = ge.copy(view.graph, tf.Graph())
    devices = [Counter(op.device for op in v.ops) for v in (view, again)]
    print(f"\n5. pinned: {dict(devices[0])}")
    checks.note(
        "a copy of the pinned copy has the same devices", devices[0] == devices[1]
    )
    image, output = info.transformed([network.image, network.output])
    with tf.compat.v1.Session(
        graph=view.graph,
        config=tf.compat.v1.ConfigProto(device_count={"CPU": 2}),
    ) as session:
        on_two = session.run(output, {image: images})
    (on_one,) = network.run([network.output], {network.image: images})
    checks.compare("the output on two devices", on_two, on_one, agree=True)


def refuse(network: Network, images: np.ndarray, checks: Checks) -> None:
    """Show two refusals: an edit that a Session would not see, and a cycle."""
    graph = network.graph
    stem = ge.filter_ops(graph, ge.op_type("Conv2D"))[0]
    last = network.output.op
    print("\n6. refused, the graph untouched")
    before = graph.as_graph_def().SerializeToString(deterministic=True)
    with tf.compat.v1.Session(graph=graph) as session:
        session.run(network.output, {network.image: images})
        try:
            ge.bypass(ge.sgv(last).remap_inputs([0]))
        except ge.StaleGraphError as refusal:
            show_refusal(refusal)
    try:
        ge.add_control_inputs(stem, last)
    except ge.CycleError as refusal:
        show_refusal(refusal)
    after = graph.as_graph_def().SerializeToString(deterministic=True)
    checks.note("the graph is byte for byte what it was", before == after)


def show_refusal(refusal: ge.GeutilError) -> None:
    """Print an error, shortened."""
    text = str(refusal)
    print(f"  {type(refusal).__name__}: {text[:220]}{'...' if len(text) > 220 else ''}")


def main() -> int:
    """Run the demonstration; the exit code is 0 when every check holds."""
    print("geutil on Keras MobileNetV2 (random weights, fixed seed)")
    network = traced_network(keras_model())
    images = np.random.default_rng(1).normal(size=(BATCH, *IMAGE)).astype(np.float32)
    checks = Checks()
    show(network.graph)
    cut(network, images, checks)
    replace_relu6(network, images, checks)
    copy_first_half(network, images, checks)
    pin_devices(network, images, checks)
    refuse(network, images, checks)
    good = sum(checks.held)
    verdict = "OK" if all(checks.held) else "FAILED"
    print(f"\n{verdict}: {good} of {len(checks.held)} checks hold")
    return 0 if all(checks.held) else 1


if __name__ == "__main__":
    sys.exit(main())
