"""Data for a network: batches by the names of its inputs, from what callers have."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import ArgumentTypeError, GeutilError
from geutil.graph.types import Tensor, type_name

BATCH_SIZE = 32
"""Samples in a batch of a file, where the network takes any number."""
ACCEPTED = (
    "a mapping from input names to batches, an array for a single input, a tuple "
    "(x, y) of which y is left out, an iterable or a tf.data.Dataset of these, a "
    "function that returns one, or the path of a .npz file or of a directory of them"
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
    - A path is that of a `.npz` file, whose arrays bear the names of the inputs and are
      split into batches of 32 samples (or of as many as the network takes), or of a
      directory with a `.npz` file for each batch.

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
    """Return the only batch that data is; None if it may hold several.

    Raises:
        ArgumentTypeError, GeutilError: as `batches`.
    """
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
        return _files_of(data, inputs, error)
    if _is_one(data, inputs):
        return [data]
    if callable(data) and not isinstance(data, Iterable):
        data = data()
    if isinstance(data, bytes) or not isinstance(data, Iterable):
        raise ArgumentTypeError(f"data is {ACCEPTED}; not {type_name(data)}")
    return data


def _is_path(data: Any) -> bool:
    return isinstance(data, str | os.PathLike)


def _is_one(data: Any, inputs: Mapping[str, Any]) -> bool:
    """Tell whether data is one batch."""
    if isinstance(data, Mapping) or _is_array(data):
        return True
    if not isinstance(data, tuple) or not data:
        return False
    # Labels may be by name, too, but then not by the names of the inputs.
    return not all(_is_for(item, inputs) for item in data)


def _is_for(item: Any, inputs: Mapping[str, Any]) -> bool:
    return isinstance(item, Mapping) and set(item) == set(inputs)


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
                f"{what} is for the inputs {given}, and the model has {sorted(names)}"
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


def _features(
    batch: tuple[Any, ...], names: list[str], what: str, error: type[GeutilError]
) -> Any:
    """Return what a tuple holds for the inputs: all but the labels, or all of it."""
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
) -> NpzBatches:
    """Return the batches of a file, of as many samples as a network takes."""
    path = Path(data)
    if not path.exists():
        raise error(
            f"there is no data at '{path}'; pass a .npz file, or a directory of them"
        )
    shapes = [t.shape for t in inputs.values()]
    sizes = {shape[0] for shape in shapes if shape.rank}
    size = next((size for size in sizes if size is not None), BATCH_SIZE)
    return NpzBatches(path, size, error)


@dataclass(frozen=True)
class NpzBatches:
    """Batches from files, by the name of the input.

    Attributes:
        path: a .npz file, which is split, or a directory of them, one for each batch.
        size: how many samples there are in a batch of a file.
        error: what is raised if they cannot be read.
    """

    path: Path
    size: int
    error: type[Exception]

    def __len__(self) -> int:
        if self.path.is_dir():
            return len(self._files())
        return math.ceil(self._samples() / self.size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.path.is_dir():
            yield from map(self._read, self._files())
            return
        for start in range(0, self._samples(), self.size):
            end = start + self.size
            yield {name: array[start:end] for name, array in self._arrays.items()}

    @cached_property
    def _arrays(self) -> dict[str, Any]:
        return self._read(self.path)

    def _files(self) -> list[Path]:
        files = sorted(self.path.glob("*.npz"))
        if not files:
            raise self.error(
                f"there is no .npz file in '{self.path}'; write one for each batch "
                "with numpy.savez"
            )
        return files

    def _samples(self) -> int:
        arrays = self._arrays
        counts = {name: len(a) if a.ndim else 0 for name, a in arrays.items()}
        if len(set(counts.values())) > 1:
            raise self.error(
                f"'{self.path}' has different numbers of samples: {counts}; give every "
                "input as many"
            )
        return next(iter(counts.values()), 0)

    def _read(self, file: Path) -> dict[str, Any]:
        try:
            with np.load(file) as archive:
                return {name: archive[name] for name in archive.files}
        # A .npy file gives an array, which has no `files` and is no context.
        except (
            OSError,
            ValueError,
            TypeError,
            AttributeError,
            zipfile.BadZipFile,
        ) as why:
            raise self.error(
                f"'{file}' is no .npz file: {why}; write one with numpy.savez"
            ) from why


def joined(
    results: Sequence[Mapping[str, Any]], error: type[GeutilError]
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the results of batches as those of all samples, batch behind batch.

    Raises:
        GeutilError: of the class `error`: an output has no axis of samples, or another
            shape in each batch.
    """
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
