"""Damage as disks, networks and editors do it."""

from __future__ import annotations

import random


def mutate(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """Return what was done to `data`, and the result."""
    while True:
        kind = rng.choice(list(_MUTATIONS))
        changed = _MUTATIONS[kind](bytearray(data), rng)
        if changed != data:  # Two equal bytes may have been swapped.
            return kind, changed


def _truncate(data, rng):
    return bytes(data[: rng.randrange(len(data))])


def _flip_bit(data, rng):
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _flip_bits(data, rng):
    for _ in range(rng.randint(2, 20)):
        _flip_bit(data, rng)
    return bytes(data)


def _delete(data, rng):
    start, end = _chunk(data, rng)
    del data[start:end]
    return bytes(data)


def _duplicate(data, rng):
    start, end = _chunk(data, rng)
    data[start:start] = data[start:end]
    return bytes(data)


def _swap(data, rng):
    i, j = (rng.randrange(len(data)) for _ in range(2))
    data[i], data[j] = data[j], data[i]
    return bytes(data)


def _set_byte(data, rng):
    data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
    return bytes(data)


def _chunk(data, rng):
    start = rng.randrange(len(data))
    return start, min(len(data), start + rng.choice((1, 2, 8, 64, 512)))


_MUTATIONS = {
    "truncated": _truncate,
    "one bit flipped": _flip_bit,
    "bits flipped": _flip_bits,
    "chunk deleted": _delete,
    "chunk duplicated": _duplicate,
    "bytes swapped": _swap,
    "byte set": _set_byte,
}
