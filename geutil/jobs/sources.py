"""Models of a batch and their data: found in folders, named, compared with before.

No TensorFlow is needed here.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeAlias

from geutil.errors import ArgumentTypeError, ModelError
from geutil.formats import TFLITE_SUFFIX, foreign_kind
from geutil.jobs.steps import PipelineStep, pickled_function
from geutil.model.files.reading import SAVED_MODEL_FILES
from geutil.sizes import size_of
from geutil.version import __version__

PathLike: TypeAlias = str | os.PathLike[str]
Paths: TypeAlias = PathLike | Sequence[PathLike]
Data: TypeAlias = PathLike | Callable[[str], Any] | None

_SUFFIXES = frozenset((".pb", ".pbtxt", ".keras", ".h5", ".hdf5", TFLITE_SUFFIX))
RANDOM = "random"
"""The name of drawn data."""


@dataclass(frozen=True)
class ModelSource:
    """A path of a batch.

    Attributes:
        why_not: why it is no model, as far as its name and first bytes tell; "" if it
            may be one.
    """

    path: Path
    name: str = ""
    why_not: str = ""


def sources_of(paths: Paths, leave_out: Path) -> list[ModelSource]:
    """Return all that is in a folder, that a pattern names, or that is listed."""
    listed = [paths] if isinstance(paths, str | os.PathLike) else paths
    if not isinstance(listed, Sequence):
        raise ArgumentTypeError(
            "models are given as a folder, a pattern or a list of paths, not "
            f"{type(paths).__name__}"
        )
    found: dict[Path, str] = {}
    for path in listed:
        if not isinstance(path, str | os.PathLike):
            raise ArgumentTypeError(f"{path!r} is no path of a model")
        for place, why_not in _expanded(path, leave_out.absolute()):
            found.setdefault(place, why_not)
    alone = isinstance(paths, str | os.PathLike)
    if not found or (alone and not any(path.exists() for path in found)):
        named = ", ".join(f"'{path}'" for path in listed) or "an empty list"
        raise ModelError(f"there is nothing at {named}; pass a folder, or models")
    names = _names(list(found))
    sources = [ModelSource(p, names[p], why_not) for p, why_not in found.items()]
    return sorted(sources, key=lambda source: source.name)


def _expanded(path: PathLike, leave_out: Path) -> Iterator[tuple[Path, str]]:
    place = Path(path).absolute()
    if not place.exists() and glob.has_magic(str(path)):
        top = Path(place.anchor)
        for match in sorted(top.glob(str(place.relative_to(top)))):
            # Of what a pattern names, folders are models or nothing.
            if leave_out not in (match, *match.parents) and match.name[0] != ".":
                yield match, "" if _is_saved_model(match) else _why_not(match)
    elif place.is_dir() and not _is_saved_model(place):
        yield from _within(place, leave_out)
    else:
        # A named path is a model, or its opening says why not.
        yield place, ""


def _within(folder: Path, leave_out: Path) -> Iterator[tuple[Path, str]]:
    waiting = [folder]
    while waiting:
        for place in sorted(waiting.pop().iterdir()):
            if place.name.startswith(".") or place == leave_out:
                continue
            if not place.is_dir():
                yield place, _why_not(place)
            elif _is_saved_model(place):
                yield place, ""
            else:
                waiting.append(place)


def _is_saved_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in SAVED_MODEL_FILES)


def _why_not(path: Path) -> str:
    if path.is_dir():
        return "the folder holds no saved_model.pb"
    if path.suffix.lower() in _SUFFIXES:
        return ""
    with path.open("rb") as opened:
        kind = foreign_kind(opened.read(16))
    return kind or f"a '{path.suffix}' file, not one of {', '.join(sorted(_SUFFIXES))}"


def _names(paths: Sequence[Path]) -> dict[Path, str]:
    """Return names: paths from the folder that all are in, if need be with suffixes."""
    top = os.path.commonpath([path.parent for path in paths])
    whole = {path: path.relative_to(top) for path in paths}
    stems = {
        path: name if path.is_dir() else name.with_suffix("")
        for path, name in whole.items()
    }
    # The results of one model are in a folder, which holds those of no other.
    taken = Counter(stems.values())
    folders: set[PurePath] = {p for name in whole.values() for p in name.parents}
    names = {
        path: whole[path] if taken[stem] > 1 or stem in folders else stem
        for path, stem in stems.items()
    }
    if len(set(names.values())) < len(names):
        names = dict(whole)
    return {path: name.as_posix() for path, name in names.items()}


@dataclass(frozen=True)
class DataSource:
    """Data for one model.

    Attributes:
        path: a .npz file, or a folder of them; None if it is something else.
        pickled: a function of the path of the model, by reference; b"" for none.
    """

    path: Path | None = None
    pickled: bytes = b""
    drawn: bool = False

    @property
    def identity(self) -> str:
        """A key that two runs on the same data have in common."""
        if self.path is not None:
            return _stamp(self.path)
        return RANDOM if self.drawn else hashlib.sha256(self.pickled).hexdigest()


def data_of(data: Data, sources: Sequence[ModelSource]) -> dict[str, DataSource | None]:
    """Return the data of each model by name; None where a folder has none for it."""
    names = [source.name for source in sources]
    if data is None:
        return {}
    if data == RANDOM:
        return dict.fromkeys(names, DataSource(drawn=True))
    if isinstance(data, str | os.PathLike):
        place = Path(data).absolute()
        if not place.exists():
            raise ModelError(
                f"there is no data at '{data}'; pass a .npz file, a folder of them, or "
                "'random'"
            )
        own = {name: _data_in(place, name) for name in names}
        if place.is_dir() and any(own.values()):
            return own
        return dict.fromkeys(names, DataSource(place))
    if callable(data):
        return dict.fromkeys(names, DataSource(pickled=pickled_function(data)))
    raise ArgumentTypeError(
        "data is the path of a .npz file or of a folder, 'random', or a function of "
        f"the path of a model; not {type(data).__name__}"
    )


def _data_in(folder: Path, name: str) -> DataSource | None:
    for place in (folder / f"{name}.npz", folder / name):
        if place.exists():
            return DataSource(place)
    return None


def fingerprint(
    source: ModelSource,
    steps: Iterable[PipelineStep],
    data: DataSource | None,
    signature: str | None,
) -> str:
    """Return a key that two calls with equal results have in common.

    The version of geutil, the steps, the signature, and of the files of model and data
    their names, sizes and times. The files are not read.
    """
    parts = [__version__, *(step.identity for step in steps), _stamp(source.path)]
    parts.append(repr(signature))
    if data is not None:
        parts.append(data.identity)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _stamp(path: Path) -> str:
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    stats = [(file, file.stat()) for file in files if file.is_file()]
    return repr([(str(f), s.st_size, s.st_mtime_ns) for f, s in stats])


def results_are_there(folder: Path, files: Mapping[str, int]) -> bool:
    """Tell whether the written files are there, in the sizes that they had."""
    return all(size_of(folder / name) == size for name, size in files.items())
