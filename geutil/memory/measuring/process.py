"""What the operating system and TensorFlow's allocator tell of this process."""

from __future__ import annotations

import re
from pathlib import Path

import tensorflow as tf

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_HIGH_WATER = "5"


class ResidentMeter:
    """Measures how far the process grows from now on. Linux only."""

    def __init__(self) -> None:
        try:
            self._start: int | None = _status("VmRSS")
            _CLEAR.write_text(_RESET_HIGH_WATER)
        except OSError:
            self._start = None

    def read(self) -> int | None:
        """Return the highest growth so far in bytes, None where it is not told."""
        return None if self._start is None else max(_status("VmHWM") - self._start, 0)


def _status(field: str) -> int:
    """Return a size from the kernel's notes on this process, in bytes."""
    match = re.search(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if match is None:
        raise OSError(f"{_STATUS} has no {field}")
    return int(match[1]) * 1024


class AllocatorMeter:
    """Measures what TensorFlow's allocator hands out from now on.

    Args:
        device: "CPU:0" or "GPU:0".
    """

    def __init__(self, device: str) -> None:
        self._device = device
        try:
            tf.config.experimental.reset_memory_stats(device)
            self._start: int | None = self._info()["current"]
        # On the CPU there are statistics with oneDNN's allocator only.
        except ValueError:
            self._start = None

    def read(self) -> int | None:
        """Return the peak above the start in bytes, None where it is not counted."""
        return None if self._start is None else self._info()["peak"] - self._start

    def _info(self) -> dict[str, int]:
        info: dict[str, int] = tf.config.experimental.get_memory_info(self._device)
        return info
