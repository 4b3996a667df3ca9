"""XLA compiles gradients that it traces; steps keep their image layouts on a GPU."""

from collections import Counter
from functools import partial

import keras
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import device_properties_pb2, meta_graph_pb2
from tensorflow.python.grappler.cluster import Cluster
from tensorflow.python.grappler.tf_optimizer import OptimizeGraph

from geutil.gradients import checkpointed, gradients, last_report
from tests.settings import needs_eager


def is_compiled():
    """Tell whether gradients that are built here take the graph to be compiled."""
    x = tf.ones([4])
    (slope,) = gradients(tf.sin(tf.sin(x)), x, checkpoints=None, order=False)
    return last_report(slope).resident is None


def note(answers):
    answers.append(is_compiled())


def in_itself(answers):
    note(answers)


def in_a_function(answers):
    @tf.function
    def inner():
        note(answers)
        return tf.constant(1.0)

    inner()


def in_a_nested_function(answers):
    tf.function(lambda: in_a_function(answers))()


def in_a_loop(answers):
    def body(i):
        note(answers)
        return i + 1

    tf.while_loop(lambda i: i < 2, body, [tf.constant(0)])


def in_a_branch(answers):
    def branch():
        note(answers)
        return tf.constant(1)

    tf.cond(tf.random.stateless_uniform([], [1, 2]) < 0.5, branch, branch)


@needs_eager
@pytest.mark.parametrize("jit_compile", [True, False, None])
def test_what_is_traced_in_a_compiled_function_is_compiled(jit_compile):
    traces = in_itself, in_a_function, in_a_nested_function, in_a_loop, in_a_branch
    answers = {where.__name__: [] for where in traces}

    def everywhere():
        for where in traces:
            where(answers[where.__name__])

    tf.function(everywhere, jit_compile=jit_compile)()
    found = {name: {*told} for name, told in answers.items()}
    assert found == {name: {bool(jit_compile)} for name in answers}
    # So is a compiled function in one that is not; known during the trace only.
    answers, graphs = [], []
    compiled = tf.function(lambda: note(answers), jit_compile=True)

    @tf.function(jit_compile=jit_compile)
    def outer():
        compiled()
        note(answers)
        graphs.append(tf.compat.v1.get_default_graph())

    outer()
    assert answers == [True, bool(jit_compile)]
    with graphs[0].as_default():
        assert not is_compiled()


@pytest.mark.parametrize("level", ["OFF", "ON_1"])
def test_a_plain_graph_is_not_compiled(level):
    graph = tf.Graph()
    options = tf.compat.v1.GraphOptions()
    options.optimizer_options.global_jit_level = getattr(
        tf.compat.v1.OptimizerOptions, level
    )
    config = tf.compat.v1.ConfigProto(graph_options=options)
    with graph.as_default(), tf.compat.v1.Session(config=config) as session:
        assert not is_compiled()
        assert session.run(tf.constant(1.0) + 1.0) == 2.0


PLACE = "/job:localhost/replica:0/task:0/device:{}:0"


def on_a_gpu(function):
    """Return how often each op and data format is in what a GPU runs."""
    graph = function.graph
    meta = meta_graph_pb2.MetaGraphDef(graph_def=graph.as_graph_def(add_shapes=True))
    for node in meta.graph_def.node:
        node.attr.pop("_class", None)
        node.device = PLACE.format("GPU" if "GPU" in node.device else "CPU")
    names = [op.name for op in (*(t.op for t in graph.outputs), *graph.control_outputs)]
    meta.collection_def["train_op"].node_list.value.extend(names)
    devices = [
        device_properties_pb2.NamedDevice(
            name=PLACE.format(kind),
            properties=device_properties_pb2.DeviceProperties(
                type=kind, environment={"architecture": "9.0"} if kind == "GPU" else {}
            ),
        )
        for kind in ("CPU", "GPU")
    ]
    cluster = Cluster(True, True, True, devices)
    with tf.Graph().as_default():
        run = OptimizeGraph(tf.compat.v1.ConfigProto(), meta, cluster=cluster)
    return Counter((n.op, n.attr["data_format"].s.decode()) for n in run.node)


def images():
    keras.utils.set_random_seed(0)
    layers = keras.layers
    net = keras.Sequential([keras.Input([32, 32, 3])])
    for width in (8, 16):
        convolution = layers.Conv2D(width, 3, padding="same")
        block = convolution, layers.BatchNormalization(), layers.ReLU()
        for layer in (*block, layers.MaxPooling2D()):
            net.add(layer)
    net.add(layers.GlobalAveragePooling2D())
    return net


def traced(take, device="/GPU:0", net=None):
    """Return the function of a training step, all of it on a device."""
    net = net or images()
    weights = [v.value for v in net.trainable_variables]

    @tf.function(autograph=False)
    def step(x):
        with tf.device(device):
            loss = tf.reduce_mean(tf.square(net(x, training=True)))
            for w, g in zip(weights, take(loss, weights), strict=True):
                w.assign_sub(0.1 * g)
        return loss

    return step.get_concrete_function(tf.TensorSpec([4, 32, 32, 3]))


def turned(found):
    """Return how many ops are channels first, and how many transpositions there are."""
    first = sum(n for (_, layout), n in found.items() if layout.startswith("NC"))
    return first, sum(n for (op, _), n in found.items() if op == "Transpose")


of_memory = partial(gradients, checkpoints="memory")


def test_a_step_on_a_gpu_keeps_its_layout():
    # Of a plain one there is something to keep away.
    assert min(turned(on_a_gpu(traced(tf.gradients)))) > 0
    for checkpoints in (None, "memory"):
        take = partial(gradients, checkpoints=checkpoints)
        assert turned(on_a_gpu(traced(take))) == (0, 0)


def test_layers_beside_a_wrapped_one_keep_theirs():
    net = images()
    checkpointed(net.layers[4])
    assert turned(on_a_gpu(traced(tf.gradients, net=net))) == (0, 0)


def test_ops_on_a_processor_are_left_to_grappler():
    assert held(traced(of_memory)) and not held(traced(of_memory, "/CPU:0"))


def held(function):
    nodes = function.graph.as_graph_def().node
    return [node.name for node in nodes if node.attr["_grappler_do_not_remove"].b]


@pytest.mark.parametrize(
    ("option", "usual"), [("layout_optimizer", True), ("auto_mixed_precision", False)]
)
def test_the_settings_of_the_user_come_first(option, usual):
    tf.config.optimizer.set_experimental_options({option: not usual})
    try:
        assert not held(traced(of_memory))
    finally:
        tf.config.optimizer.set_experimental_options({option: usual})
    assert held(traced(of_memory))
