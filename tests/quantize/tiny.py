"""Tiny graphs to quantize, and what FakeQuant ops do, written in numpy."""

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.settings import edges

v1 = tf.compat.v1


def fake_quant(x, low, high, bits=8, narrow_range=False):
    """Return what a FakeQuant op makes of an array; ends may be one for each channel.

    Written after the description of the op: a grid of 2^bits - 1 steps, moved so that
    zero is on it. In float32, as the kernels compute.
    """
    one = np.float32(1)
    least, most = np.float32(narrow_range), np.float32(2**bits - 1)
    low, high = np.float32(low), np.float32(high)
    scale = (high - low) / (most - least)
    zero = np.clip(np.floor(least - low / scale + one / 2), least, most)
    bottom, top = (least - zero) * scale, (most - zero) * scale
    inverse = one / scale
    steps = np.floor((np.clip(x, bottom, top) - bottom) * inverse + one / 2)
    return np.float32(steps * scale + bottom)


def check_fake_quant(actual, x, low, high, bits=8, narrow_range=False):
    """Check that values are those of a grid, and the nearest ones.

    Unlike `fake_quant` this takes either neighbour where a value is half way between
    two to within float32.
    """
    least, most = float(narrow_range), 2.0**bits - 1
    low, high = np.float64(low), np.float64(high)
    scale = (high - low) / (most - least)
    zero = np.clip(np.round(least - low / scale), least, most)
    bottom, top = (least - zero) * scale, (most - zero) * scale
    steps = np.float64(actual) / scale
    rounding = 4 * 2.0**-24 * 2.0**bits
    np.testing.assert_allclose(steps, np.round(steps), rtol=0, atol=rounding)
    apart = np.abs(actual - np.clip(np.float64(x), bottom, top)) / scale
    np.testing.assert_array_less(apart, 0.5 + rounding)


def passes(x, low, high, bits=8, narrow_range=False):
    """Return where a FakeQuant op lets gradients pass: 1 in the range, else 0."""
    top = fake_quant(np.float32(3e38), low, high, bits, narrow_range)
    bottom = fake_quant(np.float32(-3e38), low, high, bits, narrow_range)
    return np.float32((x >= bottom) & (x <= top))


def ends(x, axes=None):
    """Return the range of an array with zero in it; of some axes."""
    return np.minimum(x.min(axes), 0), np.maximum(x.max(axes), 0)


def symmetric_ends(x, axes=None):
    """Return the narrow symmetric range of an array."""
    size = np.abs(x).max(axes)
    return -size, size


def averaged(batches, decay=0.999):
    """Return the moving average of the ends of batches, of nothing but them."""
    weights = decay ** np.arange(len(batches))[::-1]
    low, high = zip(*batches, strict=True)
    return tuple(
        np.average(np.stack(end), axis=0, weights=weights) for end in (low, high)
    )


def of_ranges(variables):
    """Return the variables that hold ends of ranges."""
    return {n: v for n, v in variables.items() if n.endswith(("/min", "/max"))}


@contextmanager
def session(graph):
    """Open a Session of a graph, variables initialized."""
    with graph.as_default():
        start = v1.global_variables_initializer()
    with v1.Session(graph=graph) as opened:
        opened.run(start)
        yield opened


def state(graph):
    return edges(graph), [v.name for v in graph.get_collection("variables")]


def refused(graph, error, match, call, *args, **options):
    """Check that a call raises an error, and that a graph is as it was."""
    before = state(graph)
    with pytest.raises(error, match=match):
        call(*args, **options)
    assert state(graph) == before


def types(graph):
    """Return the types of the ops of a graph."""
    return [op.type for op in graph.get_operations()]


def fake_quants(graph):
    """Return the FakeQuant ops of a graph."""
    return [op for op in graph.get_operations() if op.type.startswith("FakeQuant")]


def close(actual, expected, tolerance=1e-6):
    """Check values to within rounding of float32, of their size or of 1."""
    expected = np.asarray(expected)
    size = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * size)


@dataclass
class Layer:
    name: str
    w: Any
    b: Any = None
    relu: bool = True


class Reference:
    """Layers with their gradients and their descent on the sum of squares, by `count`.

    Attributes:
        layers: as the steps left them.
        ranges: the ends of the last step by name.
    """

    def __init__(self, layers, rate, decay=0.999, per_channel=True, count=1):
        self.layers, self.rate, self.decay = layers, rate, decay
        self.count = count
        self.axes = 0 if per_channel else None
        self.seen, self.ranges = {}, {}

    def step(self, x, rounds=True, rate=None):
        """Do a training step; return the results."""
        rate = self.rate if rate is None else rate
        x, _ = self._activation("x/input_quant", x, rounds)
        back = []
        for layer in self.layers:
            name = f"{layer.name}/weights_quant"
            self.ranges[name] = symmetric_ends(layer.w, self.axes)
            w, passed = self._rounded(name, layer.w, True, rounds)
            y = x @ w if layer.b is None else x @ w + layer.b
            made = np.maximum(y, 0) if layer.relu else y
            out, through = self._activation(f"{layer.name}/act_quant", made, rounds)
            through = through * (y > 0) if layer.relu else through
            back.append((layer, x, w, passed, through))
            x = out
        gradient = 2 * x / self.count
        for layer, given, w, passed, through in reversed(back):
            gradient = gradient * through
            layer.w = layer.w - rate * (given.T @ gradient) * passed
            if layer.b is not None:
                layer.b = layer.b - rate * gradient.sum(0)
            gradient = gradient @ w.T
        return x

    def _activation(self, name, values, rounds):
        seen = self.seen.setdefault(name, [])
        seen.append(ends(values))
        self.ranges[name] = averaged(seen, self.decay)
        return self._rounded(name, values, False, rounds)

    def _rounded(self, name, values, narrow, rounds):
        if not rounds:
            return values, np.float32(1)
        given = values, *self.ranges[name], 8, narrow
        return fake_quant(*given), passes(*given)
