"""Inputs of a batch: the steps of its pipeline, its models and their data.

Everything is read and checked before anything runs, without TensorFlow; the steps are
implemented in the process that runs them (`geutil.cli.batch_child`).
"""

from __future__ import annotations

import glob
import hashlib
import inspect
import os
import pickle
import pickletools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, TypeAlias

from geutil.errors import ArgumentTypeError, ModelError, Words
from geutil.formats import SAVED_MODEL_FILES, TFLITE_SUFFIX, foreign_kind
from geutil.graph.walks import tree
from geutil.sizes import size_of
from geutil.version import __version__

Pipeline: TypeAlias = str | Callable[..., Any] | Sequence[str | Callable[..., Any]]
"""Steps as a caller gives them: text, a function, or several of these in order."""

SCHEMES = (
    "int8",
    "int8x4",
    "int16x8",
    "dynamic_range",
    "dynamic_range_int4",
    "weight_only_int8",
    "weight_only_int4",
)
"""Schemes of `geutil.quantize.quantize`."""
_RANGED = ("int8", "int8x4", "int16x8")
"""Schemes that need ranges of activations."""
_METHODS = ("best", "moving_average", "min_max", "percentile", "entropy", "mse")
_BITS = range(2, 17)
_DATA = Words("data=")
_COUNT = range(1, 1 << 31)

OPTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "fold": {"strict": bool},
        "strip": {},
        "freeze": {},
        "unroll": {"max_ops": _COUNT},
        "batch-size": {"size": _COUNT},
        "quantize": {
            "scheme": SCHEMES,
            "weight_bits": _BITS,
            "activation_bits": _BITS,
            "method": _METHODS,
            "rounding": ("nearest", "gptq", "adaround"),
            "strict": bool,
        },
        "save": {"format": ("saved_model", "graph_def", "pbtxt")},
        "tflite": {
            "scheme": (*SCHEMES, "float16"),
            "order": ("converter", "least_memory"),
        },
    }
)
"""Steps by name, with values of their options: the first is that of `name=value`."""
_REQUIRED = {"batch-size": "size"}


@dataclass(frozen=True)
class PipelineStep:
    """One step of a pipeline.

    Attributes:
        name: its name in `OPTIONS`, or that of a function.
        options: the options that were given, in the order of `OPTIONS`.
        pickled: a function, by reference; b"" for steps of `OPTIONS`.
        source: a digest of the source of the function, where that is known.
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    pickled: bytes = b""
    source: str = ""

    def __str__(self) -> str:
        return ":".join([self.name, *(f"{k}={v}" for k, v in self.options)])

    def option(self, name: str) -> Any:
        """Return an option; None if it was not given."""
        return dict(self.options).get(name)

    @property
    def identity(self) -> str:
        """A key that two runs of the same step have in common."""
        if not self.pickled:
            return str(self)
        digest = hashlib.sha256(self.pickled).hexdigest()[:16]
        return f"{self.name}@{digest}{self.source}"


def steps_of(pipeline: Pipeline) -> tuple[PipelineStep, ...]:
    """Return the steps of a pipeline.

    Example:
        >>> from geutil.jobs.batch_inputs import steps_of
        >>> [str(step) for step in steps_of("fold:strict, batch-size=1, tflite:int8")]
        ['fold:strict=True', 'batch-size:size=1', 'tflite:scheme=int8']
    """
    parts: Iterable[Any]
    parts = [pipeline] if isinstance(pipeline, str) or callable(pipeline) else pipeline
    if not isinstance(parts, Sequence):
        raise _no_pipeline(pipeline)
    steps: list[PipelineStep] = []
    for part in parts:
        if isinstance(part, str):
            steps += [_step(text.strip()) for text in part.split(",") if text.strip()]
        elif callable(part):
            steps.append(_function_step(part))
        else:
            raise _no_pipeline(part)
    if not steps:
        raise ModelError(f"the pipeline is empty; name steps, of {', '.join(OPTIONS)}")
    return tuple(steps)


def _no_pipeline(value: Any) -> ArgumentTypeError:
    return ArgumentTypeError(
        "a pipeline is text such as 'fold,quantize,tflite', a function of a model, or "
        f"a list of these; not {type(value).__name__}"
    )


def _step(text: str) -> PipelineStep:
    """Return the step that text such as "quantize:int8:weight_bits=4" names."""
    head, *tokens = text.split(":")
    name, mark, value = head.partition("=")
    if name not in OPTIONS:
        raise ModelError(
            f"there is no step '{name}'; the steps are {', '.join(OPTIONS)}"
        )
    # `name=value` is short for `name:value`.
    if mark:
        tokens.insert(0, value)
    given: dict[str, Any] = {}
    for token in tokens:
        key, read = _option(name, token)
        if key in given:
            raise ModelError(f"step '{text}' gives {key} twice; leave one out")
        given[key] = read
    missing = _REQUIRED.get(name)
    if missing is not None and missing not in given:
        raise ModelError(f"step '{name}' needs its {missing}, as in '{name}=1'")
    accepted = OPTIONS[name]
    return PipelineStep(
        name, tuple((key, given[key]) for key in accepted if key in given)
    )


def _option(step: str, token: str) -> tuple[str, Any]:
    """Return the option that one part of a step's text gives, and its value."""
    accepted = OPTIONS[step]
    key, mark, value = token.partition("=")
    if not mark:
        # The name of a switch, or the value of the first option.
        if accepted.get(key) is bool:
            return key, True
        key, value = next(iter(accepted), ""), token
    if key not in accepted:
        options = ", ".join(accepted) or "none"
        raise ModelError(
            f"step '{step}' has no option '{key or value}'; its options: {options}"
        )
    kind = accepted[key]
    if kind is bool and value.lower() in ("true", "false"):
        return key, value.lower() == "true"
    if isinstance(kind, range) and value.isdecimal() and int(value) in kind:
        return key, int(value)
    if isinstance(kind, tuple) and value in kind:
        return key, value
    if isinstance(kind, range):
        wanted = f"a number from {kind.start} to {kind.stop - 1}"
    else:
        wanted = "true or false" if kind is bool else f"one of {', '.join(kind)}"
    raise ModelError(f"step '{step}' takes {key} as {wanted}, not '{value}'")


def _function_step(function: Callable[..., Any]) -> PipelineStep:
    innermost: Any = function
    while isinstance(innermost, partial):
        innermost = innermost.func
    module = getattr(innermost, "__module__", "")
    name = f"{module}.{getattr(innermost, '__qualname__', type(innermost).__name__)}"
    return PipelineStep(name, (), pickled_function(function), _source_digest(innermost))


def _source_digest(function: Any) -> str:
    try:
        source = inspect.getsource(function)
    # An object that is called, or a function that was made without a file.
    except (OSError, TypeError):
        return ""
    return "-" + hashlib.sha256(source.encode()).hexdigest()[:16]


def pickled_function(function: Any) -> bytes:
    """Return a function pickled by reference, for a process that imports it."""
    name = getattr(function, "__qualname__", type(function).__name__)
    try:
        pickled = pickle.dumps(function)
    # The object's own code may raise any error.
    except Exception as error:
        raise _not_importable(name, f"it cannot be pickled: {error}") from error
    if any(argument == "__main__" for _, argument, _ in pickletools.genops(pickled)):
        raise _not_importable(name, "it is defined in the main script")
    return pickled


def _not_importable(name: str, reason: str) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"the process of a model cannot import '{name}': {reason}; put it at the top "
        "level of a module"
    )


def check_order(steps: Sequence[PipelineStep], *, with_data: bool) -> None:
    """Refuse a pipeline that cannot work, whatever the model."""
    quantized: PipelineStep | None = None
    has_function = False
    for step in steps:
        has_function = has_function or bool(step.pickled)
        if step.name == "quantize":
            quantized = step
            if step.option("rounding") not in (None, "nearest") and not with_data:
                raise ModelError(
                    f"step '{step}' rounds by data", remedy=f"pass {_DATA}"
                )
        # A function of the caller may have quantized the model.
        if step.name == "tflite" and not has_function:
            _check_file(step, quantized, with_data=with_data)
    if with_data and quantized is None and not has_function:
        raise ModelError(
            "no step of the pipeline reads data",
            remedy=f"leave {_DATA} out, or add 'quantize'",
        )


def _check_file(
    step: PipelineStep, quantized: PipelineStep | None, *, with_data: bool
) -> None:
    """Refuse a file that lacks an entry that its scheme needs."""
    scheme = step.option("scheme")
    if quantized is None:
        if scheme in _RANGED:
            raise ModelError(
                f"step '{step}' stores a quantized model; put 'quantize' before it"
            )
        return
    by = quantized.option("scheme")
    # Such a scheme leaves activations in float.
    if by not in _RANGED and by is not None:
        return
    if not with_data:
        raise ModelError(
            f"'{quantized}' before '{step}' needs ranges of activations",
            remedy=f"pass {_DATA} to calibrate with, or a scheme without, such as "
            "'quantize:dynamic_range'",
        )


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
    # Among several, a path with nothing at it fails by itself.
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

    def inside(place: Path) -> list[Path]:
        if not place.is_dir() or _is_saved_model(place):
            return []
        found = sorted(place.iterdir())
        return [p for p in found if not p.name.startswith(".") and p != leave_out]

    for place in tree([folder], inside):
        if not place.is_dir():
            yield place, _why_not(place)
        elif _is_saved_model(place):
            yield place, ""


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
        # A folder without an entry for any model is one data set for all.
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
    """Return whether the written files are there, in the sizes that they had."""
    return all(size_of(folder / name) == size for name, size in files.items())
