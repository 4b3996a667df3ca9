"""The data that ranges are calibrated, and models compared with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from geutil.errors import ArgumentTypeError, QuantizeError
from geutil.graph.kinds import Tensor, type_name

Sample = dict[str, Any]


def batches(dataset: Any, inputs: Mapping[str, Tensor]) -> Iterator[Sample]:
    """Yield the batches of a dataset as tensors by the name of the input.

    Args:
        dataset: an iterable of mappings from input names to batches, a
            `tf.data.Dataset` of the same, or one such mapping.
        inputs: the inputs of the model by name.

    Raises:
        ArgumentTypeError: the dataset is nothing of this, or a batch is no mapping.
        QuantizeError: a batch lacks an input, has one too many, or does not fit; or
            there are no batches.
    """
    if isinstance(dataset, Mapping):
        dataset = [dataset]
    if isinstance(dataset, str | bytes) or not isinstance(dataset, Iterable):
        raise ArgumentTypeError(
            "data is an iterable of mappings from input names to batches, or a "
            f"tf.data.Dataset of the same, not {type_name(dataset)}"
        )
    count = 0
    for batch in dataset:
        yield _checked(batch, inputs, count)
        count += 1
    if not count:
        raise QuantizeError("the dataset is empty; there is nothing to learn from")


def _checked(batch: Any, inputs: Mapping[str, Tensor], index: int) -> Sample:
    if not isinstance(batch, Mapping):
        raise ArgumentTypeError(
            f"batch {index} is a {type_name(batch)}; pass mappings from input names to "
            f"batches, with the names {list(inputs)}"
        )
    if set(batch) != set(inputs):
        raise QuantizeError(
            f"batch {index} is for the inputs {sorted(map(str, batch))}, and the model "
            f"has {sorted(inputs)}"
        )
    return {name: _fitting(name, t, batch[name], index) for name, t in inputs.items()}


def _fitting(name: str, t: Tensor, value: Any, index: int) -> Any:
    try:
        tensor = tf.convert_to_tensor(value)
        if tensor.dtype != t.dtype:
            if tensor.dtype.is_floating and not t.dtype.is_floating:
                raise TypeError(f"{tensor.dtype.name} would be cut to {t.dtype.name}")
            tensor = tf.cast(tensor, t.dtype)
    except (TypeError, ValueError, tf.errors.OpError) as error:
        raise QuantizeError(
            f"input '{name}' of batch {index} is no {t.dtype.name} tensor: {error}"
        ) from error
    if not t.shape.is_compatible_with(tensor.shape):
        raise QuantizeError(
            f"input '{name}' of batch {index} has shape {tensor.shape}, and the model "
            f"takes {t.shape}"
        )
    return tensor
