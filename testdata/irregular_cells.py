"""Networks of irregularly wired cells, as architecture searches find them.

The wiring of a cell is drawn with a seed, like that of SwiftNet cells (Cheng et al.
2019) and of randomly wired networks (Xie et al. 2019): each node reads one or two of
those before it, as a sum or side by side, and has a width of its own.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

_WIDTHS = (4, 8, 16, 24)
_REACH = 6


def irregular_network(
    seed: int,
    *,
    pixels: int = 32,
    cells: int = 3,
    nodes: int = 10,
    width: int = 16,
    classes: int = 10,
) -> Any:
    """Return a Keras network of irregularly wired cells.

    Args:
        seed: of the wiring.
        pixels: the height and the width of the image.
        cells: how many there are; the second and the following begin with a pool.
        nodes: how many each has.
        width: the channels of the first convolution.
        classes: of the output.
    """
    chance = random.Random(seed)
    layers = _Layers()
    image = tf.keras.Input([pixels, pixels, 3], name="image")
    x = layers.Conv2D(width, 3, 2, "same", use_bias=False)(image)
    x = layers.ReLU(6.0)(layers.BatchNormalization()(x))
    for cell in range(cells):
        if cell:
            x = layers.MaxPooling2D(2)(x)
        x = _cell(x, nodes, layers, chance)
    x = layers.GlobalAveragePooling2D()(x)
    return tf.keras.Model(image, layers.Dense(classes)(x), name=f"irregular_{seed}")


class _Layers:
    """Makes Keras layers, numbered from the first of the network on.

    TFLite's converter orders ops by names, and Keras numbers layers from the first one
    of the process on: a file would depend on what else was built before.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        name = f"{kind.lower()}_{next(self._numbers):03}"
        return partial(getattr(tf.keras.layers, kind), name=name)


def _cell(x: Any, nodes: int, layers: _Layers, chance: random.Random) -> Any:
    """Return the concatenation of a cell's nodes that no other node reads."""
    made, is_read = [x], [True]
    for _ in range(nodes):
        near = range(max(len(made) - _REACH, 0), len(made))
        reads = sorted(chance.sample(near, min(chance.randint(1, 2), len(near))))
        for place in reads:
            is_read[place] = True
        made.append(_node([made[place] for place in reads], layers, chance))
        is_read.append(False)
    ends = [y for y, read in zip(made, is_read, strict=True) if not read]
    return layers.Concatenate()(ends) if len(ends) > 1 else ends[0]


def _node(reads: list[Any], layers: _Layers, chance: random.Random) -> Any:
    x, *others = reads
    if others and x.shape[-1] == others[0].shape[-1]:
        x = layers.Add()([x, *others])
    elif others:
        x = layers.Concatenate()([x, *others])
    if chance.random() < 0.5:
        x = layers.DepthwiseConv2D(3, 1, "same", use_bias=False)(x)
        x = layers.BatchNormalization()(x)
    x = layers.Conv2D(chance.choice(_WIDTHS), 1, use_bias=False)(x)
    return layers.ReLU(6.0)(layers.BatchNormalization()(x))
