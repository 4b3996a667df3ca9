"""Bits chosen for the weights of each layer, under a budget of bytes or of noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from geutil.errors import ArgumentTypeError, QuantizeError, Words
from geutil.graph.types import type_name
from geutil.quantize.bits.bit_plan import BitPlan
from geutil.quantize.bits.bit_search import BitSearch, FloatNetwork, Metric
from geutil.quantize.bits.weights import checked_bits


def choose_bits(
    model: Any,
    data: Any,
    *,
    size: int | float | None = None,
    noise: float | None = None,
    accuracy: tuple[Metric, float] | None = None,
    bits: Sequence[int] | None = None,
    scheme: str = "int8",
    method: str = "best",
    batches: int = 8,
) -> BitPlan:
    """Choose in how many bits the weights of each layer are stored, under a budget.

    The noise at the outputs is measured for each layer and each number of bits: with
    that layer alone, and with all others quantized. From the latter the best choice is
    found exactly, as a multiple-choice knapsack, since errors of layers nearly add up.
    Its noise is measured, the layers are measured again around it, and the choice is
    made again as long as that helps. In the end the network is quantized with these
    bits, as `quantize` does it, and measured once more.

    Layers are those that `quantize` quantizes; fold batch norms first. No int8 file can
    store more than 8 bits, with any layers skipped; one of `weight_only_int8` stores
    16. The savings of 4 bits depend on the kernel: depthwise, grouped and transposed
    convolutions have bytes in a file of int8.

    Args:
        model: a float `geutil.model.Model`, which is not changed.
        data: the data, as `calibrate` takes it. It is gone through once and kept.
        size: the most bytes that the weights take in the file; or, as a float below 1,
            their share of their bytes in 8 bits each. Other parts of the file, such as
            steps and biases, do not depend on the bits.
        noise: the signal to noise in dB that the outputs must have.
        accuracy: `(metric, loss)`: a metric of outputs, and the largest loss of its
            mean over the data against the float model. `metric(outputs, index)` is
            given the outputs of a batch by name, as arrays, and the place of the batch
            in the data; higher is better. Batches count by their samples.
        bits: the options of a layer: 2 to 8, and 16 if the scheme stores so many. None
            takes those of 4, 8 and 16 that it stores.
        scheme: that of the file: "int8", or "weight_only_int8", which leaves
            activations in float.
        method: how ranges of activations are calibrated; see `calibrate`.
        batches: how many of the batches noise is measured on; all of them are used to
            calibrate, and for `accuracy`.

    Returns:
        The plan; `quantize(model, scheme=plan.scheme, overrides=plan.overrides)` takes
        it. Then calibrate by `plan.method`.

    Raises:
        ArgumentTypeError: it is no model, or an argument is of another type.
        QuantizeError: not exactly one budget is given; no choice meets it, and the
            message names the reachable one; the model is quantized, or has no layers
            that can be; bits or scheme are not possible; or the data does not fit.
        MissingExtraError: OR-Tools is not installed, the extra `plan`.

    Cost: for each layer, number of bits and batch two runs of the network, and up to
        three more to refine, eight times as often for `accuracy`; the knapsacks take
        milliseconds.

    Example:
        >>> import tensorflow as tf
        >>> from geutil import model
        >>> from geutil.quantize import choose_bits, quantize
        >>> first, second = (
        ...     tf.random.stateless_normal([16, 16], seed=(1, n)) for n in range(2)
        ... )
        >>> @tf.function(input_signature=[tf.TensorSpec([None, 16], name="x")])
        ... def f(x):
        ...     hidden = tf.nn.relu(tf.matmul(x, first, name="a"))
        ...     return {"y": tf.matmul(hidden, 0.1 * second, name="b")}
        >>> m = model.open(f)
        >>> data = [{"x": tf.random.stateless_normal([32, 16], seed=(2, 2))}]
        >>> plan = choose_bits(m, data, size=0.9)
        >>> plan.size, plan.int8_size, sorted(layer.bits for layer in plan.layers)
        (384, 512, [4, 8])
        >>> report = quantize(m, is_training=False, overrides=plan.overrides)
    """
    _check_budget(size, noise, accuracy)
    chosen_bits = checked_bits(bits, scheme)
    if type(batches) is not int or batches < 1:
        raise QuantizeError(
            f"batches={batches!r} is no number of batches: pass 1 or more"
        )
    search = BitSearch(FloatNetwork(model, data, scheme, method), chosen_bits, batches)
    if noise is not None:
        chosen, budget = search.within_noise(noise), f"{noise:g} dB of signal to noise"
    elif accuracy is not None:
        chosen = search.within_accuracy(*accuracy)
        budget = f"a metric at most {accuracy[1]:g} below that in float"
    elif _is_share(size):
        # Floats of numpy, too.
        share = float(size or 0.0)
        chosen = search.within_size(int(share * search.int8_size))
        budget = f"{share:.1%} of the weights' bytes in 8 bits"
    else:
        chosen, budget = (
            search.within_size(int(size or 0)),
            f"{size:,} bytes of weights",
        )
    return search.plan(chosen, budget, accuracy)


def _check_budget(size: Any, noise: Any, accuracy: Any) -> None:
    """Raise unless one budget is given, one that something could meet."""
    if sum(given is not None for given in (size, noise, accuracy)) != 1:
        raise QuantizeError(
            "bits are chosen under one budget",
            remedy=f"pass {Words('one of size=, noise= and accuracy=')}",
        )
    for name, value in (("size", size), ("noise", noise)):
        if value is not None and not _is_number(value):
            raise ArgumentTypeError(
                f"{name} is a number, not {type_name(value)}; see choose_bits"
            )
    if size is not None and (size <= 0 or (_is_share(size) and size > 1)):
        raise QuantizeError(
            "is no budget",
            subject=Words(f"size={size}", size),
            remedy="pass whole bytes, or a share of what 8 bits take "
            f"{Words('as a float from 0 to 1')}",
        )
    if accuracy is not None:
        _check_accuracy(accuracy)


def _is_share(size: Any) -> bool:
    return not isinstance(size, int | np.integer)


def _check_accuracy(accuracy: Any) -> None:
    is_pair = isinstance(accuracy, tuple) and len(accuracy) == 2
    if not is_pair or not callable(accuracy[0]) or not _is_number(accuracy[1]):
        raise ArgumentTypeError(
            "accuracy is (metric, loss): a function of the outputs of a batch and its "
            f"place, and a number; not {accuracy!r}"
        )
    if accuracy[1] < 0:
        raise QuantizeError(f"a loss of {accuracy[1]} is none; pass 0 or more")


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, int | float | np.integer | np.floating)
    return is_real and not isinstance(value, bool) and math.isfinite(value)
