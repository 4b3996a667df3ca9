"""Steps of a pipeline: their names and options as text, or functions.

The text is read and checked before anything runs, without TensorFlow; the process that
runs a step knows its work (`geutil.cli.batch_child`).
"""

from __future__ import annotations

import hashlib
import inspect
import pickle
import pickletools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

from geutil.errors import ArgumentTypeError, ModelError, Words

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
        >>> from geutil.jobs.steps import steps_of
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
    if by not in _RANGED and by is not None:
        return
    if not with_data:
        raise ModelError(
            f"'{quantized}' before '{step}' needs ranges of activations",
            remedy=f"pass {_DATA} to calibrate with, or a scheme without, such as "
            "'quantize:dynamic_range'",
        )
