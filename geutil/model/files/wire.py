"""The wire format of protobuf, walked without parsing: fields and their places.

For what a parser would copy whole: a file of a gigabyte of weights is walked over a
memory map, and the weights are never touched.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from geutil.model.errors import ModelError

Buffer: TypeAlias = bytes | mmap.mmap

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_FIXED = {FIXED64: 8, FIXED32: 4}
_LONGEST_VARINT = 70


class Field(NamedTuple):
    """One field of a message.

    Attributes:
        number: its number in the message's definition.
        kind: its wire type.
        at: where it begins, tag included.
        start: where its value begins.
        end: where it ends.
    """

    number: int
    kind: int
    at: int
    start: int
    end: int


def fields(buffer: Buffer, start: int, end: int) -> Iterator[Field]:
    """Yield the fields of the message that lies between `start` and `end`.

    Raises:
        ModelError: what lies there is no message, or is cut off.

    Cost: linear in the fields; their values are skipped.
    """
    at = start
    while at < end:
        tag, value = varint(buffer, at, end)
        kind = tag & 7
        if kind == BYTES:
            length, value = varint(buffer, value, end)
            stop = value + length
        elif kind == VARINT:
            _, stop = varint(buffer, value, end)
        elif kind in _FIXED:
            stop = value + _FIXED[kind]
        else:
            raise ModelError(f"no protobuf: unknown wire type {kind} at byte {at}")
        if tag < 8:
            raise ModelError(f"no protobuf: field number 0 at byte {at}")
        if stop > end:
            raise ModelError(
                f"truncated protobuf: the field at byte {at} ends {stop - end} bytes "
                "behind its message"
            )
        yield Field(tag >> 3, kind, at, value, stop)
        at = stop


def varint(buffer: Buffer, at: int, end: int) -> tuple[int, int]:
    """Return the number at `at` and where it ends.

    Raises:
        ModelError: it is cut off, or longer than a number can be.
    """
    if at < end and buffer[at] < 128:
        return buffer[at], at + 1
    result = shift = 0
    while at < end and shift < _LONGEST_VARINT:
        byte = buffer[at]
        result |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return result, at
        shift += 7
    raise ModelError(f"truncated or damaged protobuf: no whole number at byte {at}")


def length_delimited(number: int, value: bytes) -> bytes:
    """Return a field of bytes, encoded."""
    return _encoded(number << 3 | BYTES) + _encoded(len(value)) + value


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
