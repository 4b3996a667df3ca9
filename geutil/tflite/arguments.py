"""Arguments of the public calls of the room, checked by their annotations."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from geutil.errors import ArgumentTypeError, TFLiteError

C = TypeVar("C", bound=Callable[..., Any])

_NUMBERS: Mapping[Any, tuple[type, ...]] = {
    bool: (bool, np.bool_),
    float: (int, float, np.integer, np.floating),
    int: (int, np.integer),
}
# Characters of a value that a message prints.
_LONG = 80
_WORDS: Mapping[Any, str] = {
    bool: "True or False",
    float: "a number",
    int: "a whole number",
    str: "a text",
    "Contents": "a LiteFile: open it with geutil.tflite.open, and convert a function "
    'by geutil.model.open(...).save(path, "tflite")',
    types.NoneType: "None",
}


def checked(function: C) -> C:
    """Return a function that refuses arguments which its annotations do not allow.

    Iterators are taken as lists. Arguments that the caller leaves out are not looked
    at, nor is the file.
    """
    signature = inspect.signature(function)
    # Classes of modules that import this one can be named only later.
    hints = functools.cache(lambda: typing.get_type_hints(function))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        for name, value in [*bound.arguments.items()]:
            if name in ("cls", "file", "self"):
                continue
            kind, hint = signature.parameters[name].kind, hints()[name]
            if kind is inspect.Parameter.VAR_POSITIONAL:
                hint = Sequence[hint]  # type: ignore[valid-type]
            elif kind is inspect.Parameter.VAR_KEYWORD:
                continue
            if isinstance(value, Iterator):
                value = bound.arguments[name] = [*value]
            if not _fits(value, hint, name):
                raise ArgumentTypeError(
                    f"{function.__name__}: {name}= cannot be {_shown(value)}; pass "
                    f"{_described(hint)}"
                )
        return function(*bound.args, **bound.kwargs)

    return typing.cast(C, call)


def check_text(value: Any, what: str) -> str:
    """Return a text that a file can hold."""
    if not isinstance(value, str):
        raise ArgumentTypeError(f"{what} is a text, not {_shown(value)}; pass a str")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise TFLiteError(
            f"{what} cannot be {value!r}: files hold UTF-8, and that encodes no "
            f"{value[error.start]!r}; pass a text without it"
        ) from None
    return value


def check_numbers(values: Any, kind: type, what: str) -> None:
    """Refuse values that are no tuple of numbers of a kind."""
    if isinstance(values, tuple) and {*map(type, values)} <= {kind}:
        return
    if not isinstance(values, tuple) or not all(_fits(v, kind, what) for v in values):
        raise ArgumentTypeError(
            f"{what} cannot be {_shown(values)}; pass a tuple of {_WORDS[kind]} each"
        )


def _shown(value: Any) -> str:
    text = repr(value)
    said = text if len(text) < _LONG else f"{text[:_LONG]}..."
    return f"{said} of type {type(value).__name__}"


@functools.cache
def _parted(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(hint), typing.get_args(hint)


def _fits(value: Any, hint: Any, name: str) -> bool:
    """Return whether a value is one that an annotation allows."""
    origin, parts = _parted(hint)
    if hint is Any:
        return True
    if isinstance(hint, TypeVar):
        return _fits(value, hint.__bound__, name)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part, name) for part in parts)
    if origin is typing.Literal:
        return isinstance(value, str) and value in parts
    if hint is str and isinstance(value, str):
        return bool(check_text(value, f"{name}=") or True)
    if hint in _NUMBERS:
        # A bool is an int in Python, and a mistake where a number is wanted.
        is_bool = isinstance(value, bool | np.bool_)
        return isinstance(value, _NUMBERS[hint]) and is_bool == (hint is bool)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            _fits(one, part, name)
            for pair in value.items()
            for one, part in zip(pair, parts, strict=True)
        )
    if origin in (Iterable, Sequence):
        # A text is iterable, too, and its letters are never the list that is meant.
        is_list = isinstance(value, Iterable) and not isinstance(
            value, str | bytes | Mapping
        )
        return is_list and all(_fits(one, parts[0], name) for one in value)
    if origin is Callable:
        return callable(value)
    return isinstance(value, origin or hint)


def _described(hint: Any) -> str:
    """Return the values that an annotation allows, in words."""
    origin, parts = _parted(hint)
    if isinstance(hint, TypeVar):
        return _described(hint.__bound__)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_described, parts)))
    if origin is typing.Literal:
        return " or ".join(map(repr, parts))
    if origin is Mapping:
        return f"a mapping from {_described(parts[0])} to {_described(parts[1])}"
    if origin in (Iterable, Sequence):
        return f"a list of {_described(parts[0])}"
    if origin is Callable:
        return "a function"
    name = getattr(origin or hint, "__name__", "value")
    return _WORDS.get(hint) or _WORDS.get(name, f"a {name}")
