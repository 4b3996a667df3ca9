"""What samples share: datasets that are counted, and ops without results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

raw = tf.raw_ops
Sample = Callable[[str, Any], Any]


def counted(dataset: Any) -> Any:
    """Return how many elements a dataset has."""
    return dataset.reduce(np.int64(0), lambda count, _: count + 1)


def variant(op: Any, **inputs: Any) -> Any:
    """Return how many strings a dataset has that a raw op makes."""
    return counted_variant(op(**inputs))


def counted_variant(dataset: Any) -> Any:
    """Return how many strings a dataset has that is given as a variant."""
    reduced = raw.ReduceDataset(
        input_dataset=dataset,
        initial_state=[tf.constant(0, tf.int64)],
        other_arguments=[],
        f=_count.get_concrete_function(),
        output_types=[tf.int64],
        output_shapes=[[]],
    )
    return reduced[0]


@tf.function(
    input_signature=[tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.string)]
)
def _count(n: Any, _: Any) -> Any:
    return n + 1


def done(op: Any, x: Any) -> Any:
    """Return x behind an op without results."""
    with tf.control_dependencies([op]):
        return tf.identity(x)


def written(marker: str, x: Any) -> Any:
    """Return x, with the marker written before."""
    return done(raw.WriteFile(filename=marker, contents="x"), x)


@dataclass(frozen=True)
class FileSample:
    """A file that does more than compute.

    Attributes:
        kind: its power.
        write: writes it into a folder, given the path of the marker; returns its path.
        run: loads or runs it; None if it cannot be run here.
        why: why it cannot.
        prepare: makes the marker, for samples that read it.
    """

    kind: str
    write: Callable[[Path, Path], Path]
    run: Callable[[Path, Path], None] | None
    why: str = ""
    prepare: Callable[[Path], Any] = lambda marker: marker.write_text("a,1\n")
