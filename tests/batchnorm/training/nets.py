"""Small nets with a batch norm in training, written as graphs hold them.

Each net can be built again in another form over the same weights: with the statistics
of the batch, or with moving ones. A trial compares the forms.
"""

from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from geutil.batchnorm import fold_batch_norms
from geutil.graph import verify
from geutil.graph.runtime import uses_onednn

CHANNELS = 6
MOMENTUM = 0.9
# Large, so that a mistake with it shows.
EPSILON = 0.1
LAYERS = ("conv", "depthwise", "dilated", "atrous", "dense", "separable")
if not uses_onednn():  # TensorFlow has no other gradient of a dilated kernel.
    LAYERS = tuple(name for name in LAYERS if name != "dilated")
STATISTICS = ("exact", "one_pass")
ACTIVATIONS = {"relu": tf.nn.relu, "relu6": tf.nn.relu6, "none": tf.identity}
v1 = tf.compat.v1


def variable(values, *, trainable=True, resource=True):
    """Return a variable of a v1 graph."""
    return v1.Variable(
        np.float32(values), trainable=trainable, use_resource=resource, dtype=tf.float32
    )


@dataclass
class Averages:
    """Moving statistics; each norm in training has its own."""

    mean: tf.Variable
    variance: tf.Variable


@dataclass
class Net:
    """A layer, a norm, and heads behind it, over weights at random.

    Attributes:
        layer: which layer.
        fused: whether the norm is one op.
        scale: whether the norm has a gamma.
        bias: whether the layer has a bias.
        seed: of the weights.
        resource: whether the variables are resource variables.
    """

    layer: str
    fused: bool
    scale: bool = True
    bias: bool = True
    seed: int = 0
    resource: bool = True
    variables: list = field(init=False)

    def __post_init__(self):
        """Make the variables, in the default graph."""
        self.name = f"{self.layer}, fused: {self.fused}, resource: {self.resource}"
        self.random = np.random.default_rng(self.seed)
        self.kernels = [self._variable(s, 1.0) for s in self._kernel_shapes()]
        self.offset = self._variable([CHANNELS]) if self.bias else None
        gamma = self.random.uniform(0.5, 2.0, CHANNELS)
        self.gamma = variable(gamma, resource=self.resource) if self.scale else None
        self.beta = self._variable([CHANNELS])
        # Of different size, so that each head counts in the gradients.
        self.weights = self.random.uniform(0.5, 2.0, 3)
        maybe = (*self.kernels, self.offset, self.gamma, self.beta)
        self.variables = [v for v in maybe if v is not None]

    def _variable(self, shape, size=0.5):
        values = self.random.normal(size=shape) * size
        return variable(values, resource=self.resource)

    def _kernel_shapes(self):
        return {
            "conv": [(3, 3, 3, CHANNELS)],
            "depthwise": [(3, 3, 3, 2)],
            "dilated": [(3, 3, 3, CHANNELS)],
            "atrous": [(3, 3, 3, CHANNELS)],
            "dense": [(5, CHANNELS)],
            "separable": [(3, 3, 3, 1), (1, 1, 3, CHANNELS)],
            "transposed": [(3, 3, CHANNELS, 3)],
        }[self.layer]

    def input(self):
        """Return data for the net, and a placeholder whose sizes are not known."""
        shape = (16, 5) if self.layer == "dense" else (4, 8, 8, 3)
        values = np.float32(self.random.normal(size=shape))
        unknown = [None] * (len(shape) - 1) + [shape[-1]]
        return values, v1.placeholder(tf.float32, unknown)

    def averages(self):
        """Return moving statistics at random: the same ones at each call."""
        random = np.random.default_rng(self.seed + 1)
        mean = random.normal(size=CHANNELS)
        variance = random.uniform(0.5, 2.0, CHANNELS)
        return Averages(
            variable(mean, trainable=False, resource=self.resource),
            variable(variance, trainable=False, resource=self.resource),
        )

    def linear(self, x):
        """Return what the layer makes of data."""
        weights = self.kernels[0]
        match self.layer:
            case "conv":
                y = tf.nn.conv2d(x, weights, 2, "SAME", name="layer")
            case "dilated":
                y = tf.nn.conv2d(x, weights, 1, "SAME", dilations=2, name="layer")
            case "atrous":
                pads = [[2, 2], [2, 2]]
                spread = tf.space_to_batch(x, [2, 2], pads)
                y = tf.nn.conv2d(spread, weights, 1, "VALID", name="layer")
                y = tf.raw_ops.BatchToSpaceND(
                    input=y, block_shape=[2, 2], crops=[[0, 0], [0, 0]]
                )
            case "depthwise":
                y = tf.nn.depthwise_conv2d(x, weights, [1, 1, 1, 1], "SAME")
            case "separable":
                strides = [1, 2, 2, 1]
                y = tf.nn.separable_conv2d(x, weights, self.kernels[1], strides, "SAME")
            case "transposed":
                shape = tf.concat([tf.shape(x)[:3] * [1, 2, 2], [CHANNELS]], 0)
                y = tf.nn.conv2d_transpose(x, weights, shape, 2, "SAME")
            case "dense":
                y = tf.matmul(x, weights, name="layer")
        y = y if self.offset is None else tf.nn.bias_add(y, self.offset)
        if self.layer == "dense" and self.fused:
            # A fused norm takes images alone.
            y = tf.reshape(y, [-1, 1, 1, CHANNELS])
        return y

    def trained(self, x, averages):
        """Return the heads with the batch's statistics, and the updates."""
        y = self.linear(x)
        if self.fused:
            gamma = tf.ones([CHANNELS]) if self.gamma is None else self.gamma
            z, mean, variance = v1.nn.fused_batch_norm(
                y, gamma, self.beta, epsilon=EPSILON, name="norm"
            )
        else:
            mean, variance = tf.nn.moments(y, list(range(len(y.shape) - 1)))
            z = tf.nn.batch_normalization(
                y, mean, variance, self.beta, self.gamma, EPSILON, name="norm"
            )
        pairs = (averages.mean, mean), (averages.variance, variance)
        return self._heads(z), [update(*pair, self.fused) for pair in pairs]

    def deployed(self, x, averages):
        """Return the heads with the moving statistics."""
        z = tf.nn.batch_normalization(
            self.linear(x),
            averages.mean,
            averages.variance,
            self.beta,
            self.gamma,
            EPSILON,
        )
        return self._heads(z)

    def _heads(self, z):
        both = tf.concat([z, z + tf.fill(tf.shape(z), 0.3)], 0)
        return [activation(both) for activation in ACTIVATIONS.values()]

    def loss(self, heads):
        """Return a number that each head goes into in its own way."""
        return tf.add_n(
            [
                weight * tf.nn.l2_loss(head - weight) / 100.0
                for weight, head in zip(self.weights, heads, strict=True)
            ]
        )


def update(moving, statistic, by_difference):
    """Move an average on, by assigning a difference or a new value."""
    if by_difference:
        change = (moving - statistic) * (1.0 - MOMENTUM)
        return v1.assign_sub(moving, change)
    return v1.assign(moving, moving * MOMENTUM + statistic * (1.0 - MOMENTUM))


class Trial:
    """Nets in three forms in one graph: folded, as they were, and deployed.

    Args:
        makes: functions that make nets in the default graph.
        delay, statistics: options of the fold.
    """

    def __init__(self, makes, delay, statistics):
        self.graph, self.delay, self.statistics = tf.Graph(), delay, statistics
        self.feeds, self.nets = {}, []
        self.folded, self.unfolded, self.deployed = [], [], []
        self.moving, self.moving_unfolded = [], []
        with self.graph.as_default():
            for make in makes:
                self._build(make())
            self.report = self.fold()
            self.values, self.expected, self.frozen = (
                [self._values(*parts) for parts in form]
                for form in (self.folded, self.unfolded, self.deployed)
            )
            start = v1.global_variables_initializer()
        # What is compared is what is written: Grappler has no part in it.
        config = v1.ConfigProto()
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        self.session = v1.Session(graph=self.graph, config=config)
        self.session.run(start)

    def fold(self):
        """Fold what is in the scope "folded", and verify the graph."""
        report = fold_batch_norms(
            self.graph,
            scope="folded",
            is_training=True,
            freeze_batch_norm_delay=self.delay,
            statistics=self.statistics,
        )
        verify(self.graph)
        return report

    def _build(self, net):
        values, x = net.input()
        self.feeds[x] = values
        self.nets.append(net)
        averages, own = net.averages(), net.averages()
        with tf.name_scope("folded/net"):
            self.folded.append((net, x, *net.trained(x, averages)))
        with tf.name_scope("unfolded/net"):
            self.unfolded.append((net, x, *net.trained(x, own)))
        self.moving += [averages.mean, averages.variance]
        self.moving_unfolded += [own.mean, own.variance]
        if self.delay is not None:
            with tf.name_scope("deployed/net"):
                self.deployed.append((net, x, net.deployed(x, averages), []))

    def _values(self, net, x, heads, updates):
        gradients = tf.gradients(net.loss(heads), [x, *net.variables])
        return [*heads, *gradients], updates

    def _check_close(self, expected):
        """Run a step, and check that the folded nets' values are close to others."""
        found = self.session.run((self.values, expected), self.feeds)
        check_close(*(self._by_name(form) for form in found))

    def _by_name(self, form):
        return {net.name: of[0] for net, of in zip(self.nets, form, strict=True)}

    def check(self):
        """Check two steps in training, and two behind a freeze."""
        for step in range(2):
            if self.delay is not None:
                assert self.session.run(self.report.step) == step
            self._check_close(self.expected)
            close(*self.session.run([self.moving, self.moving_unfolded]))
        if self.delay is not None:
            moving = self.session.run(self.moving)
            for step in range(2, 4):
                self._check_close(self.frozen)
                assert self.session.run(self.report.step) == step + 1
            np.testing.assert_array_equal(self.session.run(self.moving), moving)


def close(actual, expected):
    """Check values and gradients: 1e-5 of their size, or of 1 where they are small."""
    for one, other in zip(actual, expected, strict=True):
        size = max(1.0, np.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * size)


def check_close(found, expected):
    """Check that lists of values are close to others, and name all that are not."""
    wrong = {}
    for name, values in expected.items():
        try:
            close(found[name], values)
        except AssertionError as error:
            wrong[name] = str(error)
    assert not wrong, wrong


def ops_by_type(graph, kind):
    """Return the ops of a type."""
    return [op for op in graph.get_operations() if op.type == kind]
