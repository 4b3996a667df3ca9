"""All combinations of the issue, point by point against numpy.

| dimension | values | where |
|---|---|---|
| layer | conv, dense, depthwise, separable, atrous | tests |
| norm | fused, unfused, none | tests |
| variables | resource, ref, constant | tests |
| activation | relu, relu6, none | nets of a graph |
| bypass | with, without | nets of a graph |
| delay | None, 0, 3 | calls with a scope each |
| per channel | with, without | calls with a scope each |
| scope | with, without | tests |
| statistics | exact, one_pass | tests |

Of delay and per channel each test takes two combinations in turn, and without a scope
one; of activation and bypass all, or, in `make test`, four pairs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from geutil.batchnorm import fold_batch_norms
from geutil.graph import verify
from geutil.quantize import quantize
from tests.quantize.combined_nets import ACTIVATIONS, LAYERS, SIZE, Net
from tests.quantize.tiny import (
    check_fake_quant,
    close,
    ends,
    fake_quants,
    session,
    symmetric_ends,
    types,
)
from tests.thorough import crossed, is_quick

v1 = tf.compat.v1
STATISTICS = ["exact", "one_pass"]
FORMS = list(itertools.product([None, 0, 3], [True, False]))
PARTS = LAYERS, ["fused", "unfused", "none"], ["resource", "ref", "constant"]
CASES = list(itertools.product(*PARTS))


def _forms(case, count):
    """Return combinations of delay and per channel; neighbouring cases have others."""
    start = count * CASES.index(case) + CASES.index(case) // len(FORMS)
    return [FORMS[(start + i) % len(FORMS)] for i in range(count)]


def _few(pairs):
    """Return each activation with a bypass or without; both where none follows."""
    return [pairs[0], pairs[3], *pairs[4:]]


def _nets(layer, norm, variables, seed):
    random = np.random.default_rng(seed)
    nets = {}
    pairs = list(itertools.product(ACTIVATIONS, [True, False]))
    for activation, bypass in _few(pairs) if is_quick() else pairs:
        name = f"{activation}_{'bypass' if bypass else 'plain'}"
        with tf.name_scope(name):
            net = Net(layer, norm, variables, activation, bypass, random)
            nets[name] = net.build()
    return nets


@dataclass(eq=False)
class Point:
    """A FakeQuant op with its surroundings."""

    op: Any
    source: Any
    result: Any

    @property
    def fetches(self):
        return self.source, self.result, self.op.inputs[1], self.op.inputs[2]


def _points(graph, scope, report):
    """Return the points below a scope, by the last part of the name of their range."""
    points = {}
    for op in fake_quants(graph):
        if op.name.startswith(f"{scope}/"):
            source = op.inputs[0]
            if source.op.type == "Reshape" and op.type.endswith("PerChannel"):
                source = source.op.inputs[0]
            slot = op.name.removeprefix(f"{scope}/").rpartition("/")[0]
            points[slot] = Point(op, source, report.tensor(source))
    return points


def _before_the_sum(net):
    # A fused norm of a dense layer is followed by a Reshape, and not by the sum.
    reshaped = net.layer == "dense" and net.norm == "fused"
    return "layer/act_quant" if reshaped else "layer/conv_quant"


def _expected_slots(net):
    slots = {"input_quant", "layer/weights_quant"}
    slots.add("end/act_quant" if net.activation != "none" else "end/add_quant")
    if net.bypass:
        slots.add(_before_the_sum(net))
    else:
        slots = {"input_quant", "layer/weights_quant", "layer/act_quant"}
    if net.layer == "separable":
        # Both halves are in one scope, so that whole names tell them apart.
        slots -= {"layer/weights_quant", "layer/act_quant"}
        slots |= {
            "layer/first/weights_quant",
            "layer/op/weights_quant",
            "layer/first/act_quant" if not net.bypass else "layer/act_quant",
        }
        if not net.bypass:
            slots.add("layer/op/act_quant")
    return slots


class Trial:
    """Nets that were quantized in one way, in a graph."""

    def __init__(self, graph, prefix, nets, delay, per_channel, report, statistics):
        self.delay, self.per_channel, self.report = delay, per_channel, report
        self.nets = {prefix + name: net for name, net in nets.items()}
        self.points = {n: _points(graph, n, report) for n in self.nets}
        self.graph, self.statistics = graph, statistics
        for name, net in self.nets.items():
            assert set(self.points[name]) == _expected_slots(net), name

    def fetches(self):
        """Return what to fetch in a step: points, and what the old layers read."""
        values = {}
        for name, net in self.nets.items():
            old = self.graph.get_operation_by_name(f"{name}/layer/op")
            new = old
            if net.norm != "none":
                new = self.graph.get_operation_by_name(f"{name}/layer/op_fold")
            values[name] = (
                {s: p.fetches for s, p in self.points[name].items()},
                _data_of(old),
                _data_of(new),
                new.inputs[1],
            )
        return values

    def check(self, step, values):
        for name, net in self.nets.items():
            fetched, old_x, x, w = values[name]
            rounds = not self.delay or step + 1 >= self.delay
            for slot, (source, result, low, high) in fetched.items():
                weights = slot.endswith("weights_quant")
                if low.size == SIZE and source.shape[-1] == 1:
                    # The channels of a depthwise convolution are two axes.
                    low, high = low.reshape(SIZE, 1), high.reshape(SIZE, 1)
                if rounds:
                    check_fake_quant(result, source, low, high, 8, weights)
                else:
                    np.testing.assert_array_equal(result, source)
            self._check_weights(name, net, fetched)
            self._check_values(net, fetched, old_x, x, w)

    def _check_weights(self, name, net, fetched):
        (slot,) = (
            s for s in ("layer/op/weights_quant", "layer/weights_quant") if s in fetched
        )
        source, _, low, high = fetched[slot]
        close(source, net.weights(), 2e-6)
        channels = self.per_channel
        op = self.points[name][slot].op
        assert op.type.endswith("PerChannel") == channels
        assert op.get_attr("narrow_range")
        axes = None
        if channels:
            axes = {"dense": (0,), "depthwise": (0, 1, 3)}.get(net.layer, (0, 1, 2))
        close([low, high], symmetric_ends(source, axes))

    def _check_values(self, net, fetched, old_x, x, w):
        """Check what stands before the FakeQuant ops against numpy."""
        made = net.result(x, w, old_x, self.statistics)
        last = "end/act_quant" if net.activation != "none" else "end/add_quant"
        if net.bypass:
            source, result, _, _ = fetched[_before_the_sum(net)]
            close(source, made.reshape(source.shape), 1e-5)
            total = result.reshape(-1, *net.data.shape[1:]) + fetched["input_quant"][1]
            close(fetched[last][0], net.activated(total))
        else:
            slot = (
                "layer/op/act_quant" if net.layer == "separable" else "layer/act_quant"
            )
            source = fetched[slot][0]
            close(source, net.activated(made).reshape(source.shape), 1e-5)


def _data_of(op):
    """Return what a layer reads; before it is spread for an atrous convolution."""
    x = op.inputs[0]
    return x.op.inputs[0] if x.op.type == "SpaceToBatchND" else x


def _run(graph, trials, untouched):
    """Run steps and check each; ranges are those of the formula from the start."""
    steps = 4 if any(trial.delay for trial in trials) else 1
    feeds = {net.x: net.data for t in trials for net in t.nets.values()}
    feeds |= {net.x: net.data for net in untouched}
    fetches = [trial.fetches() for trial in trials]
    tracked = [
        {n: v for n, v in t.report.variables.items() if "weights" not in n}
        for t in trials
    ]
    with session(graph) as opened:
        before = opened.run(tracked)
        for step in range(steps):
            values = opened.run(fetches, feeds)
            after = opened.run(tracked)
            for trial, one, old, new in zip(trials, values, before, after, strict=True):
                trial.check(step, one)
                _check_ranges(one, old, new)
            before = after


def _check_ranges(values, before, after):
    for name, (fetched, *_) in values.items():
        for slot, (source, _, low, high) in fetched.items():
            if "weights" in slot:
                continue
            names = [f"{name}/{slot}/{end}" for end in ("min", "max")]
            learnt = [values[f"{name}/{slot}/learnt"] for values in (before, after)]
            share = (1 - 0.999) / learnt[1]
            close(learnt[1], 0.999 * learnt[0] + 0.001)
            for end, new in zip(names, ends(source), strict=True):
                close(after[end], (1 - share) * before[end] + share * new)
            np.testing.assert_array_equal([after[n] for n in names], [low, high])


def _choosing(graph):
    """Return the ops that choose whether to quantize; folds choose among scales."""
    return [
        op
        for op in graph.get_operations()
        if op.type == "SelectV2" and "training_fold" not in op.name
    ]


@pytest.mark.parametrize(
    ("layer", "norm", "variables", "statistics", "scoped"),
    crossed(*PARTS, STATISTICS, [True, False], together=1),
)
def test_points_and_values(layer, norm, variables, statistics, scoped):
    case = layer, norm, variables
    graph, trials, made, outside = tf.Graph(), [], {}, {}
    forms = _forms(case, 2 if scoped else 1)
    with graph.as_default():
        for index, (delay, per_channel) in enumerate(forms):
            prefix = f"delay_{delay}_{per_channel}"
            with tf.name_scope(prefix):
                made[prefix] = _nets(*case, seed=index)
        if scoped:
            with tf.name_scope("outside"):
                outside = _nets(*case, seed=7)
    folds = fold_batch_norms(graph, is_training=True, statistics=statistics)
    count = sum(len(nets) for nets in (*made.values(), outside))
    assert len(folds.folded) == (0 if norm == "none" else count)
    for (prefix, nets), (delay, per_channel) in zip(made.items(), forms, strict=True):
        scope = {"scope": prefix} if scoped else {}
        report = quantize(graph, quant_delay=delay, per_channel=per_channel, **scope)
        assert all(e.op.startswith(prefix) for e in report.quantized)
        assert [e for e in report.skipped if e.op.startswith(prefix)] == []
        assert scoped or (report.coverage, report.skipped) == (1.0, ())
        form = delay, per_channel
        trials.append(Trial(graph, f"{prefix}/", nets, *form, report, statistics))
    verify(graph)
    choosing = _choosing(graph)
    assert bool(choosing) == any(delay for delay, _ in forms)
    assert all(op.name.startswith("delay_3") for op in choosing)
    assert types(graph).count("AssignAddVariableOp") == bool(choosing)
    assert not any(op.name.startswith("outside") for op in fake_quants(graph))
    _run(graph, trials, outside.values())
