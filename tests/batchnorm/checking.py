"""Graphs with batch norms, and their folds compared with the graphs as they were."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil.batchnorm import FoldReport, fold_batch_norms
from geutil.graph.adjacency import topological_sort
from tests.thorough import chosen

EPSILON = 1e-3
PARAMETERS = ("constants", "resource variables", "ref variables", "partitioned")


class Builder:
    """Makes data and parameters at random, the same for the same seed."""

    def __init__(self, parameters="constants", seed=0):
        self.random = np.random.default_rng(seed)
        self.parameters = parameters
        self.feeds = {}
        self._count = 0

    def data(self, *shape, known=(), dtype=tf.float32):
        """A placeholder, of which all sizes but that of the channels may be unknown."""
        declared = [None if axis in known else n for axis, n in enumerate(shape)]
        x = tf.compat.v1.placeholder(dtype, declared, name=f"data_{len(self.feeds)}")
        self.feeds[x.name] = self.random.normal(size=shape)
        return x

    def weights(self, *shape, dtype=tf.float32):
        return self.parameter(self.random.normal(size=shape), dtype)

    def positive(self, *shape, dtype=tf.float32):
        return self.parameter(self.random.uniform(0.5, 2.0, size=shape), dtype)

    def parameter(self, value, dtype=tf.float32):
        value = np.asarray(value, dtype.as_numpy_dtype)
        if self.parameters == "constants":
            return tf.constant(value, dtype)
        self._count += 1
        options = {}
        if self.parameters == "partitioned" and value.ndim and value.shape[-1] > 1:
            parts = [1] * (value.ndim - 1) + [2]
            options["partitioner"] = lambda shape, dtype: parts
        variable = tf.compat.v1.get_variable(
            f"variable_{self._count}",
            initializer=tf.constant(value),
            use_resource=self.parameters != "ref variables",
            **options,
        )
        return tf.convert_to_tensor(variable)

    def values(self, count):
        """A mean, a variance, an offset and a scale."""
        return [make(count) for make in (self.weights, self.positive) * 2]

    def norm(self, x, count=None, name="norm", center=True, scale=True):
        """A batch norm by the function of TensorFlow that writes out its ops."""
        mean, variance, offset, gamma = self.values(
            x.shape[-1] if count is None else count
        )
        offset, gamma = offset if center else None, gamma if scale else None
        return tf.nn.batch_normalization(
            x, mean, variance, offset, gamma, EPSILON, name=name
        )

    def fused(self, x, data_format="NHWC"):
        """A batch norm that is one op."""
        mean, variance, *rest = self.values(x.shape[data_format.index("C")])
        return tf.compat.v1.nn.fused_batch_norm(
            x, *rest[::-1], mean, variance, EPSILON, data_format, is_training=False
        )[0]

    def norm_of_first(self, x):
        """A batch norm of channels on axis 1, written out."""
        values = (tf.reshape(t, [-1, 1, 1]) for t in self.values(x.shape[1]))
        return tf.nn.batch_normalization(x, *values, EPSILON)

    def by_hand(self, x):
        """A batch norm in arithmetic."""
        mean, variance, offset, scale = self.values(x.shape[-1])
        return scale * (x - mean) / tf.sqrt(variance + EPSILON) + offset


def built(build, parameters="constants", seed=0):
    """Return a graph that ends in an op called `out`, and what to feed."""
    return built_together({"": build}, [parameters], seed)


def built_together(builds, parameters, seed=0):
    """Return a graph of several, each in a scope of its own, and what to feed."""
    builder = Builder(seed=seed)
    with tf.Graph().as_default() as graph:
        for scope, build in builds.items():
            builder.parameters, *rest = parameters
            parameters = [*rest, builder.parameters]
            with tf.name_scope(scope):
                tf.negative(tf.cast(build(builder), tf.float32), name="out")
    return graph, builder.feeds


def run(graph, feeds, fetched="out:0"):
    config = tf.compat.v1.ConfigProto()
    options = config.graph_options.rewrite_options
    formats = {op.node_def.attr["data_format"].s for op in graph.get_operations()}
    # Channels first, of which the processor knows little, are turned for it by
    # Grappler; else it has no part in what is compared.
    options.cpu_layout_conversion = 1
    options.disable_meta_optimizer = b"NCHW" not in formats
    session = tf.compat.v1.Session(graph=graph, config=config)
    with session, graph.as_default():
        session.run(tf.compat.v1.global_variables_initializer())
        return session.run(fetched, feeds)


def folded(build, parameters="constants", *, seed=0, bound=1e-5, **options):
    """Fold a graph, compare it with one that was not folded, and return the outcome."""
    (outcome,) = _folded({"": build}, [parameters], seed, **options)
    assert outcome.error <= bound * outcome.spread, (outcome.error, outcome.spread)
    return outcome


def check_together(builds, check=None, parameters=PARAMETERS, *, bound=1e-5, **options):
    """Fold several at once, and check the outcome of each; name all that are wrong.

    Args:
        builds: functions of a builder by name.
        check: a function of a name and an outcome that asserts; `check_bare` if None.
        parameters: kinds of parameters, which the builds take in turn.
    """
    scopes = {f"case_{i}/": build for i, build in enumerate(builds.values())}
    wrong = {}
    outcomes = _folded(scopes, [*parameters], 0, **options)
    for name, outcome in zip(builds, outcomes, strict=True):
        try:
            check_bare(outcome) if check is None else check(name, outcome)
            assert outcome.error <= bound * outcome.spread, outcome.error
        except AssertionError as error:
            wrong[name] = f"{error}\n{outcome.report}"
    assert not wrong, wrong


def _folded(builds, parameters, seed, **options):
    before, feeds = built_together(builds, parameters, seed)
    graph, _ = built_together(builds, parameters, seed)
    report = fold_batch_norms(graph, **options)
    ge.verify(graph)
    for op in graph.get_operations():
        assert "//" not in op.name
    again = fold_batch_norms(graph, **options)
    assert not again.folded, again
    assert [e.norm for e in again.refused] == [e.norm for e in report.refused]
    outs = [f"{scope}out:0" for scope in builds]
    values = [run(g, feeds, outs) for g in (before, graph)]
    outcomes = []
    for scope, expected, found in zip(builds, *values, strict=True):
        assert found.shape == expected.shape
        part = FoldReport(
            *(
                tuple(e for e in entries if f"{e.norm}/".startswith(scope))
                for entries in (report.folded, report.refused)
            )
        )
        error, spread = np.abs(found - expected).max(), np.ptp(expected)
        types = data_types(graph, f"{scope}out")
        outcome = {"report": part, "types": types, "error": error, "spread": spread}
        outcomes.append(SimpleNamespace(graph=graph, **outcome))
    return outcomes


def needed(*elements, controls=False):
    """Return ops, those behind tensors, and what they need; if asked, await, too."""
    queue = list(dict.fromkeys(getattr(e, "op", e) for e in elements))
    found = set(queue)
    for op in queue:
        before = [*(t.op for t in op.inputs), *(op.control_inputs if controls else ())]
        new = [o for o in dict.fromkeys(before) if o not in found]
        found.update(new)
        queue += new
    return queue


def data_types(graph, out="out"):
    """Count the types of ops from the data to `out`."""
    data = set()
    for op in topological_sort(needed(graph.get_operation_by_name(out))):
        if op.type == "Placeholder" or (
            op.type != "Shape" and any(t.op in data for t in op.inputs)
        ):
            data.add(op)
    return Counter(op.type for op in data)


def additions(types):
    return sum(types[kind] for kind in ("Add", "AddV2", "BiasAdd", "BiasAddV1", "Sub"))


def multiplications(types):
    return types["Mul"] + types["RealDiv"] + types["FusedBatchNormV3"]


def check_bare(outcome, norms=1, additions_left=1):
    """All norms are folded, and each layer is a layer and an addition."""
    report, types = outcome.report, outcome.types
    assert outcome.spread > 0, "the result does not vary"
    assert len(report.folded) == norms, report
    assert not report.refused, report
    assert not multiplications(types), types
    assert additions(types) == additions_left, types


# Kinds of parameters, from another one on in each.
TURNED = pytest.mark.parametrize(
    "parameters",
    chosen([(*PARAMETERS[i:], *PARAMETERS[:i]) for i in range(4)], PARAMETERS),
    ids=lambda parameters: parameters[0],
)
