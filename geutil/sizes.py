"""Sizes of files and of memory in words: one unit for each, in commands and pages."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

# SI: 1 kB is 1,000 bytes.
_KILO = 1000
_UNITS = ("B", "kB", "MB", "GB")


def size_text(size: float) -> str:
    """Return a number of bytes in B, or in kB, MB or GB of 10^3, 10^6 and 10^9 bytes.

    Example:
        >>> [size_text(size) for size in (532, 29_340, 231_000_000, 1_683_000_000)]
        ['532 B', '29.3 kB', '231 MB', '1.68 GB']
    """
    power = 0
    # As it is shown: 999,960 bytes are no 1000.0 kB.
    while power < len(_UNITS) - 1 and abs(size) >= 999.95:
        size, power = size / _KILO, power + 1
    places = 0 if not power or abs(size) >= 100 else 1 + (power == len(_UNITS) - 1)
    return f"{size:.{places}f} {_UNITS[power]}"


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder; 0 if there is none."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


_READ = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_READ |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def byte_count(amount: Any) -> int | None:
    """Return a number or a text such as "1.5GB" as bytes; None if neither."""
    if isinstance(amount, bool):
        return None
    if isinstance(amount, int | float):
        return int(amount) if 0 < amount < math.inf else None
    read = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", str(amount))
    unit = _READ.get(read[2].upper()) if read else None
    if not isinstance(amount, str) or read is None or unit is None:
        return None
    return int(float(read[1]) * unit) or None
