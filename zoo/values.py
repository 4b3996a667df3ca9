"""Values: how far apart they are, and where they lie between processes."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

Array = np.ndarray[Any, Any]
Values = Mapping[str, Array]


def keep(path: Path, value: Any) -> None:
    """Write a value for the other process, whole or not at all."""
    part = path.with_suffix(".part")
    part.write_bytes(pickle.dumps(value))
    part.replace(path)


def kept(path: Path) -> Any:
    """Return what the other process wrote."""
    return pickle.loads(path.read_bytes())


def without_grappler() -> None:
    """Let graphs run as they are: its rewrites show in the last bits."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def arrays(results: Mapping[str, Any]) -> dict[str, Array]:
    """Return tensors as arrays, `output_9` before `output_10`.

    A signature's file holds a map of them, which each process reads in an order of its
    own.
    """
    return {name: np.asarray(results[name]) for name in sorted(results, key=_by_name)}


def _by_name(name: str) -> list[Any]:
    parts = re.split(r"(\d+)", name)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)]


def paired(found: Values, wanted: Values) -> list[tuple[str, Array, Array]]:
    """Pair outputs by name, or in order where the names are others."""
    if len(found) != len(wanted):
        raise ValueError(f"outputs {list(found)} instead of {list(wanted)}")
    if set(found) == set(wanted):
        return [(name, found[name], wanted[name]) for name in wanted]
    both = zip(wanted, found.values(), wanted.values(), strict=True)
    return list(both)


def apart(found: Values, wanted: Values) -> float:
    """Return the largest difference of all outputs, relative to their ranges.

    Where there is one value only, it is relative to that.

    It is 0.0 only if all bits are the same, and infinite where values are not numbers,
    or another shape or dtype.
    """
    pairs = paired(found, wanted)
    return max((_apart(a, b) for _, a, b in pairs), default=0.0)


def _apart(a: Array, b: Array) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not a.size or a.tobytes() == b.tobytes():
        return 0.0
    if a.dtype.kind in "OSUb":
        return 0.0 if bool(np.all(a == b)) else float("inf")
    if a.dtype.kind == "c":
        a, b = (np.stack([x.real, x.imag]) for x in (a, b))
    x, y = a.astype(np.float64), b.astype(np.float64)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    finite = np.isfinite(y)
    if not np.all(same | (np.isfinite(x) & finite)):
        return float("inf")
    x, y_ = (np.where(same, 0.0, value) for value in (x, y))
    difference = float(np.abs(x - y_).max())
    span = float(np.ptp(y[finite])) if finite.any() else 0.0
    # All values are one: a scalar has no range, and differs by a share of itself.
    span = span or float(np.abs(y[finite]).max(initial=0.0))
    return difference / max(span, 1e-12) if difference else 0.0


def slopes_apart(pairs: Sequence[tuple[Array, Array]]) -> float:
    """Return the largest difference of gradients.

    It is relative to the largest entry of each, or to a thousandth of the largest of
    all: many gradients are zero but for rounding.
    """
    largest = max((float(np.abs(b).max(initial=0.0)) for _, b in pairs), default=0.0)
    least = max(1e-3 * largest, 1e-12)
    return max((_slope_apart(a, b, least) for a, b in pairs), default=0.0)


def _slope_apart(a: Array, b: Array, least: float) -> float:
    if a.shape != b.shape or not np.all(np.isfinite(a) == np.isfinite(b)):
        return float("inf")
    there = np.isfinite(b)
    difference = float(np.abs(a[there] - b[there]).max(initial=0.0))
    return difference / max(float(np.abs(b[there]).max(initial=0.0)), least)


def noise(found: Sequence[Values], wanted: Sequence[Values]) -> float | None:
    """Return the mean of noise over variance of the float outputs; None without one.

    Args:
        found: what a file gives, batch by batch.
        wanted: what the model gives.
    """
    batches = [paired(a, b) for a, b in zip(found, wanted, strict=True)]
    ratios = [_noise(pairs) for pairs in zip(*batches, strict=True)]
    known = [ratio for ratio in ratios if ratio is not None]
    return float(np.mean(known)) if known else None


def noise_in_order(found: Sequence[Values], exact: Sequence[Values]) -> float | None:
    """Return the noise of a file's outputs, which may have other names."""
    ordered = []
    for ours, outputs in zip(found, exact, strict=True):
        same_names = set(ours) == set(outputs)
        values = [ours[n] for n in (outputs if same_names else sorted(ours))]
        names = outputs if same_names else sorted(outputs)
        ordered.append(dict(zip(names, values, strict=True)))
    return noise(ordered, exact)


def _noise(pairs: Sequence[tuple[str, Array, Array]]) -> float | None:
    """Return noise over variance of one output, given batch by batch."""
    _, a, b = pairs[0]
    is_float = b.dtype.kind == "f" or b.dtype.name == "bfloat16"
    if not is_float or a.shape != b.shape:
        return None
    x = np.concatenate([np.ravel(a) for _, a, _ in pairs]).astype(np.float64)
    y = np.concatenate([np.ravel(b) for _, _, b in pairs]).astype(np.float64)
    finite = np.isfinite(y)
    variance = float(np.var(y[finite])) if finite.any() else 0.0
    return float(np.mean((x - y)[finite] ** 2)) / variance if variance else None


def loss_of(outputs: Mapping[str, Any]) -> Any:
    """Return a loss of outputs by name; None if none of them is a float."""
    terms = [
        tf.reduce_mean(tf.square(tf.cast(outputs[name], tf.float32)))
        for name in sorted(outputs)
        if outputs[name].dtype.is_floating
    ]
    return tf.add_n(terms) if terms else None
