"""Messages out of a large proto, without the payloads of their constants.

A file's protos are cut from a memory map piece by piece. Small messages are parsed
many at a time; of a large one a copy is made first, without its long values.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from geutil.graph.protos import PARSE_ERRORS
from geutil.model.errors import ModelError
from geutil.model.files.wire import BYTES, Buffer, Field, fields, length_delimited

Span: TypeAlias = tuple[int, int]
"""Where a message lies in a buffer."""

_LARGE = 1 << 14
"""Bytes beyond which a message is not parsed with its neighbours, nor a value kept."""

_BATCH = 1 << 18
_DEEPEST = 100


@contextmanager
def mapped(file: Path) -> Iterator[Buffer]:
    """Give the bytes of a file as a memory map: what is not looked at is not read.

    Raises:
        ModelError: the file cannot be opened, or it is empty.
    """
    try:
        if not file.stat().st_size:
            raise ModelError(f"'{file}' is empty")
        with file.open("rb") as handle:
            view = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"'{file}' cannot be read: {error.strerror}") from error
    with view:
        yield view


def spans(buffer: Buffer, span: Span, number: int) -> list[Span]:
    """Return where the messages in a field of the message at `span` lie.

    Raises:
        ModelError: the message is truncated or damaged.

    Cost: linear in the fields of the message itself.
    """
    return [
        (f.start, f.end)
        for f in fields(buffer, *span)
        if f.number == number and f.kind == BYTES
    ]


def message(buffer: Buffer, span: Span, proto: Any, *numbers: int) -> Any:
    """Parse the message at `span`, with nothing but these of its fields.

    Long values within them, of constants for example, are left out.

    Raises:
        ModelError: the message is truncated or damaged.

    Cost: linear in what is parsed.
    """
    parts = [
        _slim(buffer, field, proto.DESCRIPTOR, 0)[0]
        for field in fields(buffer, *span)
        if field.number in numbers
    ]
    return _parsed(proto, b"".join(parts))


def elements(
    buffer: Buffer, span: Span, proto: Any, name: str
) -> Iterator[tuple[Any, int]]:
    """Yield the messages in a repeated field of the message at `span`.

    Args:
        buffer: holds the message.
        span: where it lies.
        proto: the message's class.
        name: the name of the field.

    Yields:
        Each element without its long values, and how many bytes these take.

    Raises:
        ModelError: the message is truncated or damaged.

    Cost: linear in the elements, without their long values; memory for a batch of them.
    """
    number = proto.DESCRIPTOR.fields_by_name[name].number
    start = end = span[0]
    for field in fields(buffer, *span):
        if field.number != number:
            yield from _batch(buffer, (start, end), proto, name)
            start = field.end
        elif field.end - field.at > _LARGE:
            yield from _batch(buffer, (start, end), proto, name)
            start = field.end
            data, left_out = _slim(buffer, field, proto.DESCRIPTOR, 0)
            for element in getattr(_parsed(proto, data), name):
                yield element, left_out
        elif field.end - start > _BATCH:
            yield from _batch(buffer, (start, field.end), proto, name)
            start = field.end
        end = field.end
    yield from _batch(buffer, (start, end), proto, name)


def _batch(
    buffer: Buffer, span: Span, proto: Any, name: str
) -> Iterator[tuple[Any, int]]:
    start, end = span
    if start < end:
        # Neighbouring elements make a message by themselves, which C++ parses.
        for element in getattr(_parsed(proto, buffer[start:end]), name):
            yield element, 0


def _slim(
    buffer: Buffer, field: Field, descriptor: Any, depth: int
) -> tuple[bytes, int]:
    """Return a field without the long values in it, and how many bytes these take."""
    size = field.end - field.start
    if size <= _LARGE:
        return buffer[field.at : field.end], 0
    known = descriptor.fields_by_number.get(field.number)
    inner = None if known is None else known.message_type
    if inner is None:
        return b"", size
    if depth > _DEEPEST:
        raise ModelError(f"damaged protobuf: messages nested over {_DEEPEST} deep")
    parts, kept, left_out = [], 0, 0
    for child in fields(buffer, field.start, field.end):
        part, missing = _slim(buffer, child, inner, depth + 1)
        if kept > _LARGE and _is_scalar(inner, child.number):
            part, missing = b"", child.end - child.start
        parts.append(part)
        kept += len(part)
        left_out += missing
    return length_delimited(field.number, b"".join(parts)), left_out


def _is_scalar(descriptor: Any, number: int) -> bool:
    known = descriptor.fields_by_number.get(number)
    return known is None or known.message_type is None


def _parsed(proto: Any, data: bytes) -> Any:
    try:
        return proto.FromString(data)
    except PARSE_ERRORS as error:
        raise ModelError(f"truncated or damaged protobuf: {error}") from error
