"""Files of data: checked against the inputs of a network, and split into batches.

No TensorFlow is needed: headers tell names, types and shapes before anything is run.
"""

from __future__ import annotations

import logging
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

_logger = logging.getLogger("geutil")

ARRAY, ARCHIVE = ".npy", ".npz"
ACCEPTED = "a .npz or .npy file, or a directory of them"
_CHECKED = 64
"""Files of a directory whose headers are read before work begins: 1 ms each."""
_FAULTS = (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile)

Shape = tuple[int | None, ...]


class Header(NamedTuple):
    """The header of an array in a file: its type and shape."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {shown(self.shape)}"


class Wanted(NamedTuple):
    """The type and shape that an input takes; None where one is not known."""

    dtype: str | None
    shape: Shape | None

    def __str__(self) -> str:
        shape = "of any shape" if self.shape is None else shown(self.shape)
        return f"{self.dtype or 'array'} {shape}"


def wanted(tensor: Any) -> Wanted:
    """Return the type and shape of a tensor, or of the entry of an inspection.

    Inputs of a TFLite file that are stored in steps are given as floats.
    """
    dtype, shape = tensor.dtype, tensor.shape
    name = None if dtype is None else str(getattr(dtype, "name", dtype))
    if getattr(tensor, "quantization", None) is not None:
        name = "float32"
    if shape is None or getattr(shape, "rank", 0) is None:
        return Wanted(name, None)
    return Wanted(name, tuple(None if n in (None, -1) else int(n) for n in shape))


def shown(shape: Sequence[int | None]) -> str:
    """Return a shape as messages have it.

    Example:
        >>> shown((None, 224, 3))
        '[n,224,3]'
    """
    return f"[{','.join('n' if size is None else str(size) for size in shape)}]"


def _as_they_are(names: Sequence[str]) -> dict[str, str]:
    return {name: name for name in names}


@dataclass(frozen=True)
class FileBatches:
    """Batches from files, by the names of the inputs of a network.

    Attributes:
        path: a .npz or .npy file, which is split, or a directory of them, one for each
            batch.
        size: how many samples there are in a batch of a file.
        error: what is raised if they cannot be read, or do not fit.
        inputs: what the network takes, by name; None is for data that bear the names
            of the arrays in the files.
        spelled: what names are in a TFLite file, for data that bear those.
    """

    path: Path
    size: int
    error: type[Exception]
    inputs: Mapping[str, Wanted] | None = None
    spelled: Callable[[Sequence[str]], Mapping[str, str]] = _as_they_are

    def check(self, *, tell: bool = True) -> None:
        """Compare the headers of the files with the inputs; read no values.

        Args:
            tell: warn of arrays that are left out, and of images that are not scaled.

        Raises:
            Exception: of the class `error`: a file cannot be read, an input has no
                array, or one of another shape or type.
        """
        files = self._files()
        for number, file in enumerate(files[:_CHECKED]):
            self._names(file, tell=tell and number == 0)
        if self.path.is_dir():
            return
        if not self._samples():
            raise self.error(f"'{self.path}' has no sample; give one at least")

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
        if not self.path.is_dir():
            return [self.path]
        files = sorted(p for p in self.path.iterdir() if p.suffix in (ARRAY, ARCHIVE))
        if not files:
            raise self.error(
                f"there is no .npz or .npy file in '{self.path}'; write one for each "
                "batch with numpy.savez"
            )
        return files

    def _samples(self) -> int:
        found = self._headers(self.path)
        names = self._names(self.path, tell=False).values()
        counts = {name: (found[name].shape or (0,))[0] for name in names}
        if len(set(counts.values())) > 1:
            raise self.error(
                f"'{self.path}' has different numbers of samples: {counts}; give every "
                "input as many"
            )
        return next(iter(counts.values()), 0)

    def _read(self, file: Path) -> dict[str, Any]:
        """Return the arrays of a file by the names of the inputs."""
        names = self._names(file, tell=False)
        try:
            # A single array is mapped: its batches are read as they are asked for.
            opened = np.load(file, mmap_mode="r" if file.suffix == ARRAY else None)
            if file.suffix == ARRAY:
                return dict.fromkeys(names, opened)
            with opened as archive:
                return {key: archive[name] for key, name in names.items()}
        except _FAULTS as why:
            raise self._unreadable(file, why) from why

    def _headers(self, file: Path) -> dict[str, Header]:
        """Return the headers of the arrays of a file; that of a .npy is called ""."""
        try:
            if file.suffix == ARRAY:
                with file.open("rb") as opened:
                    return {"": _header(opened)}
            with zipfile.ZipFile(file) as archive:
                found = {}
                for entry in archive.namelist():
                    with archive.open(entry) as opened:
                        found[entry.removesuffix(ARRAY)] = _header(opened)
                return found
        except _FAULTS as why:
            raise self._unreadable(file, why) from why

    def _unreadable(self, file: Path, why: Exception) -> Exception:
        return self.error(
            f"'{file}' is no {file.suffix or ARCHIVE} file that can be read: {why}; "
            "write one with numpy.savez"
        )

    def _names(self, file: Path, *, tell: bool) -> dict[str, str]:
        """Return the name of the array of each input."""
        found = self._headers(file)
        if self.inputs is None:
            return {name: name for name in found}
        names = self._assigned(file, found)
        for key, name in names.items():
            reason = misfit(found[name], self.inputs[key], whole=self.path.is_dir())
            if reason:
                array = f"array '{name}'" if name else "the array"
                raise self.error(f"{array} of '{file}' for input '{key}' {reason}")
        if tell:
            self._tell(file, found, names)
        return names

    def _assigned(self, file: Path, found: Mapping[str, Header]) -> dict[str, str]:
        """Return the name of the array of each input, or refuse the file."""
        inputs = self.inputs or {}
        if not found:
            raise self.error(
                f"'{file}' is empty: it holds no array; write one for each input with "
                "numpy.savez"
            )
        names = {key: key for key in inputs if key in found}
        by_file = {told: name for name, told in self.spelled(list(found)).items()}
        for key, told in self.spelled(list(inputs)).items():
            near = next((n for n in (told, by_file.get(key)) if n in found), None)
            if key not in names and near is not None:
                names[key] = near
        # With one input and one array, the names need not match.
        if len(inputs) == len(found) == 1:
            return {next(iter(inputs)): next(iter(found))}
        missing = [key for key in inputs if key not in names]
        if missing:
            raise self.error(
                f"'{file}' has no array for input {', '.join(map(repr, missing))}: it "
                f"holds {_listed(found)}, and the model takes {_listed(inputs)}; name "
                f"each array as its input: {self._remedy(file, found, names)}"
            )
        return {key: names[key] for key in inputs}

    def _remedy(
        self, file: Path, found: Mapping[str, Header], names: Mapping[str, str]
    ) -> str:
        """Return the call of numpy that names arrays as inputs, by shape."""
        inputs = self.inputs or {}
        free = [name for name in found if name not in names.values()]
        chosen = []
        for key, want in inputs.items():
            fits = [n for n in free if not misfit(found[n], want, whole=False)]
            array = names.get(key) or (fits[0] if fits else "...")
            free = [name for name in free if name != array]
            # The array of a .npy file has no name.
            stored = f"arrays[{array!r}]" if array else f"numpy.load('{file}')"
            chosen.append(f"{key!r}: {array if array == '...' else stored}")
        return f"numpy.savez('data.npz', **{{{', '.join(chosen)}}})"

    def _tell(
        self, file: Path, found: Mapping[str, Header], names: Mapping[str, str]
    ) -> None:
        """Warn of arrays that are left out, and of images that are not scaled."""
        unused = [name for name in found if name not in names.values()]
        if unused:
            _logger.warning(
                "'%s': left out %s, which the model has no input for",
                file,
                ", ".join(map(repr, unused)),
            )
        for key, name in names.items():
            if is_unscaled(found[name].dtype, (self.inputs or {})[key].dtype):
                _logger.warning("'%s': %s", file, unscaled(key, "uint8"))


def is_unscaled(given: Any, taken: str | None) -> bool:
    """Return whether bytes are given for floats, as images are stored."""
    return str(given) == "uint8" and "float" in (taken or "")


def unscaled(key: str, given: str) -> str:
    """Return the warning of bytes that are given for floats."""
    return (
        f"input '{key}' takes floats and is given {given}: 0 to 255 is used as it is; "
        "scale it as in training, if the model does not do that itself"
    )


def misfit(header: Header, want: Wanted, *, whole: bool) -> str:
    """Return why an array is not for an input, with the remedy; "" if it is.

    Args:
        header: what the file says of the array.
        want: what the network takes.
        whole: whether the array is one batch, and is not split.

    Example:
        >>> import numpy as np
        >>> images = Header(np.dtype("float32"), (32, 3, 8, 8))
        >>> misfit(images, Wanted("float32", (None, 8, 8, 3)), whole=False)
        'has the shape [32,3,8,8], and the model takes [n,8,8,3]; move its axes, with
        numpy.moveaxis(x, 1, -1)'
    """
    wants_text = want.dtype in ("string", "object")
    if want.dtype is not None and (header.dtype.kind in "SU") != wants_text:
        taken = "text" if wants_text else want.dtype
        return f"is {header.dtype}, and the model takes {taken}; convert it first"
    if header.dtype.kind == "f" and want.dtype and _is_integer(want.dtype):
        return (
            f"is {header.dtype}, and the model takes {want.dtype}, which would cut "
            f"fractions; convert it first, with x.astype('{want.dtype}')"
        )
    return _misshapen(header.shape, want.shape, whole=whole)


def _is_integer(dtype: str) -> bool:
    return dtype.startswith(("int", "uint"))


def _misshapen(shape: tuple[int, ...], want: Shape | None, *, whole: bool) -> str:
    """Return why a shape is not that of an input; "" if it is."""
    if want is None:
        return ""
    fits = len(shape) == len(want) and all(
        b is None or a == b or (at == 0 and not whole)
        for at, (a, b) in enumerate(zip(shape, want, strict=True))
    )
    if fits:
        return ""
    said = f"has the shape {shown(shape)}, and the model takes {shown(want)}"
    behind = want[1:]
    if shape == behind:
        return f"{said}; give it the axis of samples, with x[None]"
    if len(shape) == len(want) > 2 and (*shape[2:], shape[1]) == behind:
        return f"{said}; move its axes, with numpy.moveaxis(x, 1, -1)"
    if len(shape) == len(want) > 2 and (shape[-1], *shape[1:-1]) == behind:
        return f"{said}; move its axes, with numpy.moveaxis(x, -1, 1)"
    return f"{said}; bring it into that shape, as in training"


def _listed(entries: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name!r} ({entry})" if name else f"one array ({entry})"
        for name, entry in entries.items()
    )


def _header(opened: IO[bytes]) -> Header:
    """Read the header of an array."""
    version = np.lib.format.read_magic(opened)
    read = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    shape, _, dtype = read(opened)
    if dtype.hasobject:
        raise ValueError("it holds objects of Python, and not numbers or text")
    return Header(dtype, shape)
