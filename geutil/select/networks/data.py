"""Data for a network: batches by the names of its inputs, from what callers have."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from geutil import data_files
from geutil.data_files import FileBatches
from geutil.errors import ArgumentTypeError, GeutilError
from geutil.graph.types import Tensor, type_name

BATCH_SIZE = 32
"""Samples in a batch of a file, where the network takes any number."""
ACCEPTED = (
    "a mapping from input names to batches, an array for a single input, a tuple "
    "(x, y) of which y is left out, an iterable or a tf.data.Dataset of these, a "
    "function that returns one, or the path of a .npz or .npy file or of a directory "
    "of them"
)


def batches(
    data: Any, inputs: Mapping[str, Tensor], error: type[GeutilError]
) -> Iterator[dict[str, Any]]:
    """Yield the batches of data by the names of a network's inputs.

    - A mapping from the names of the inputs is one batch.
    - An array or tensor is one batch for the only input.
    - A tuple is one batch: `(x, y)` and `(x, y, weights)` with labels, as Keras takes
      them, of which x counts; or, of a network with several inputs, as many arrays, in
      the order of the inputs. A tuple of nothing but batches is an iterable of them.
    - Other iterables hold batches, each one of the above or a list with an array for
      each input: lists, generators, a `tf.data.Dataset`; or a function that returns
      such an iterable, as TFLite's converter takes it.
    - A path is that of a `.npz` file, whose arrays bear the names of the inputs, or of
      a `.npy` file for the only input: they are split into batches of 32 samples (or of
      as many as the network takes); or of a directory with such a file for each batch.
      Headers are compared with the inputs before anything is read. The only array of a
      file is for the only input, whatever its name; arrays that the network has no
      input for are left out, and a warning says so.

    Args:
        data: the data. An iterable is gone through once, as batches are asked for.
        inputs: the inputs of the network by name, in order.
        error: what is raised if the data does not fit.

    Yields:
        A value for each input; its dtype and shape are not looked at.

    Raises:
        ArgumentTypeError: the data is nothing of this, or a batch is not.
        GeutilError: of the class `error`: a batch lacks an input or has one too many, a
            file cannot be read, or there are no batches.

    Example:
        >>> import numpy as np
        >>> import tensorflow as tf
        >>> from geutil.errors import QuantizeError
        >>> from geutil.select.networks.data import batches
        >>> inputs = {"x": tf.TensorSpec([None, 2])}
        >>> pairs = tf.data.Dataset.from_tensor_slices((np.ones([4, 2]), np.arange(4)))
        >>> [b["x"].shape for b in batches(pairs.batch(2), inputs, QuantizeError)]
        [TensorShape([2, 2]), TensorShape([2, 2])]
        >>> next(batches(([[1.0, 2.0]], [7]), inputs, QuantizeError))
        {'x': [[1.0, 2.0]]}
    """
    count = 0
    for count, batch in enumerate(_batches_in(data, inputs, error), 1):
        yield _named(batch, inputs, f"batch {count - 1}", error)
    if not count:
        raise error("the dataset is empty; there is nothing to run on")


def one_batch(
    data: Any, inputs: Mapping[str, Any], error: type[GeutilError]
) -> dict[str, Any] | None:
    """Return the only batch that data is; None if it may hold several."""
    if _is_one(data, inputs):
        return _named(data, inputs, "the data", error)
    return None


def count_of(data: Any, inputs: Mapping[str, Any]) -> int | None:
    """Return how many batches there are, None if that is not known."""
    if _is_one(data, inputs):
        return 1
    try:
        return len(_files_of(data, inputs, GeutilError) if _is_path(data) else data)
    # A tf.data.Dataset raises if it does not know, or has no end.
    except (TypeError, GeutilError):
        return None


def _batches_in(
    data: Any, inputs: Mapping[str, Any], error: type[GeutilError]
) -> Iterable[Any]:
    if _is_path(data):
        files = _files_of(data, inputs, error)
        files.check()
        return files
    if _is_one(data, inputs):
        return [data]
    if callable(data) and not isinstance(data, Iterable):
        data = data()
    if isinstance(data, bytes) or not isinstance(data, Iterable):
        raise ArgumentTypeError(f"data is {ACCEPTED}; not {type_name(data)}")
    return data


def _is_path(data: Any) -> bool:
    return isinstance(data, str | os.PathLike)


def is_of_files(data: Any) -> bool:
    """Return whether data come from files, whose headers were checked and reported."""
    return _is_path(data) or isinstance(data, FileBatches)


def _is_one(data: Any, inputs: Mapping[str, Any]) -> bool:
    """Return whether data is one batch."""
    if isinstance(data, Mapping) or _is_array(data):
        return True
    if not isinstance(data, tuple) or not data:
        return False
    # Labels may be by name, too, but then not by the names of the inputs.
    return not all(isinstance(d, Mapping) and set(d) == set(inputs) for d in data)


def _is_array(value: Any) -> bool:
    if isinstance(value, list):
        # A list of numbers is an array that is written down.
        while isinstance(value, list) and value:
            value = value[0]
        return isinstance(value, np.number | int | float)
    return isinstance(value, np.ndarray | np.generic | int | float) or tf.is_tensor(
        value
    )


def _named(
    batch: Any, inputs: Mapping[str, Any], what: str, error: type[GeutilError]
) -> dict[str, Any]:
    """Return a batch as a mapping from the names of the inputs."""
    names = list(inputs)
    if isinstance(batch, tuple):
        batch = _features(batch, names, what, error)
    if isinstance(batch, Mapping):
        if set(batch) != set(inputs):
            given = sorted(map(str, batch))
            raise error(
                f"{what} is for the inputs {given}, and the model has {sorted(names)}; "
                f"name each array as its input{_renaming(batch, names)}"
            )
        return {name: batch[name] for name in names}
    if len(names) == 1:
        # TFLite's converter takes a list with an array for each input.
        if isinstance(batch, list) and len(batch) == 1 and not _is_array(batch):
            batch = batch[0]
        if _is_array(batch):
            return {names[0]: batch}
    elif isinstance(batch, list | tuple) and len(batch) == len(names):
        return dict(zip(names, batch, strict=True))
    raise ArgumentTypeError(
        f"{what} is a {type_name(batch)}; pass mappings from input names to batches, "
        f"with the names {names}"
    )


def _renaming(batch: Mapping[Any, Any], names: list[str]) -> str:
    """Return how a single array is named as the only input; "" of others."""
    if len(batch) != 1 or len(names) != 1:
        return ""
    return f", as in {{{names[0]!r}: {next(iter(batch))}}}"


def _features(
    batch: tuple[Any, ...], names: list[str], what: str, error: type[GeutilError]
) -> Any:
    """Return the inputs in a tuple: all but the labels, or all of it."""
    first = batch[0] if batch else None
    if len(names) > 1 and not isinstance(first, Mapping | list | tuple):
        # An array is not enough: these are the inputs, and no labels.
        if len(batch) != len(names):
            raise error(
                f"{what} is a tuple of {len(batch)}, and the model has the inputs "
                f"{names}; pass a mapping from their names, or ((x, ...), y)"
            )
        return list(batch)
    if not 1 <= len(batch) <= 3:
        raise error(
            f"{what} is a tuple of {len(batch)}; pass (x,), (x, y) or (x, y, weights)"
        )
    return first


def _files_of(
    data: Any, inputs: Mapping[str, Any], error: type[GeutilError]
) -> FileBatches:
    """Return the batches of a file, of as many samples as a network takes."""
    path = Path(data)
    if not path.exists():
        raise error(f"there is no data at '{path}'; pass {data_files.ACCEPTED}")
    shapes = [t.shape for t in inputs.values()]
    sizes = {shape[0] for shape in shapes if shape.rank}
    size = next((size for size in sizes if size is not None), BATCH_SIZE)
    taken = {name: data_files.wanted(t) for name, t in inputs.items()}
    return FileBatches(path, size, error, taken)


@dataclass(frozen=True)
class InputSeen:
    """Values that an input was given, and those that the network saw.

    Attributes:
        name: the name of the input.
        given: the type of the data.
        seen: the type that the network takes.
        low: the smallest value, of numbers.
        high: the largest value.
        mean: their mean.
    """

    name: str
    given: str
    seen: str
    low: float
    high: float
    mean: float

    @property
    def doubt(self) -> str:
        """Why the values may differ from those of training; "" if they do not."""
        if not self.seen.startswith(("float", "bfloat")) or not _looks_unscaled(self):
            return ""
        return (
            f"a mean of {self.mean:.0f} is that of images from 0 to 255: the ranges "
            "are wrong if the network was trained on scaled ones"
        )

    def __str__(self) -> str:
        values = f"{self.low:.6g} to {self.high:.6g}, mean {self.mean:.4g}"
        doubt = f" ({self.doubt})" if self.doubt else ""
        return f"given {self.given}, {values}; the network saw {self.seen}{doubt}"


def _looks_unscaled(seen: InputSeen) -> bool:
    """Return whether values are those of images in bytes, with a mean near 127."""
    is_byte = seen.low >= 0 and 128 < seen.high <= 255
    return is_byte and 64 <= seen.mean <= 191


class InputsSeen:
    """The values that the inputs of a network are given, batch by batch."""

    def __init__(self) -> None:
        self._given: dict[str, tuple[str, str]] = {}
        # The smallest, the largest, the sum and the count.
        self._sums: dict[str, tuple[float, float, float, int]] = {}

    def add(self, name: str, given: Any, seen: str) -> None:
        """Take in the values of an input in a batch, of the type they are cast to."""
        values = np.asarray(given)
        # Text has no range.
        if values.dtype.kind not in "biuf" and values.dtype.name != "bfloat16":
            return
        # An empty batch has no least value.
        if not values.size:
            return
        self._given[name] = str(values.dtype), seen
        low, high, total, count = self._sums.get(name, (np.inf, -np.inf, 0.0, 0))
        self._sums[name] = (
            min(low, float(values.min())),
            max(high, float(values.max())),
            total + float(values.sum(dtype=np.float64)),
            count + values.size,
        )

    def entries(self) -> tuple[InputSeen, ...]:
        """Return the values seen, input by input."""
        return tuple(
            InputSeen(name, *self._given[name], low, high, total / count)
            for name, (low, high, total, count) in self._sums.items()
        )


def joined(
    results: Sequence[Mapping[str, Any]], error: type[GeutilError]
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the results of batches as those of all samples, batch behind batch."""
    # The results of one batch need no common axis: a scalar is one as well.
    if len(results) == 1:
        return dict(results[0])
    whole = {}
    for name in results[0]:
        parts = [np.asarray(result[name]) for result in results]
        if not parts[0].ndim or len({part.shape[1:] for part in parts}) > 1:
            shapes = [part.shape for part in parts[:3]]
            raise error(
                f"output '{name}' of {len(parts)} batches cannot be put together: it "
                f"has the shapes {shapes}; run batch by batch"
            )
        whole[name] = np.concatenate(parts)
    return whole
