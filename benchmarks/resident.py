"""The resident memory of this process, in bytes. Linux only."""

from __future__ import annotations

from pathlib import Path


def resident() -> int:
    """Return what is resident now."""
    return _status("VmRSS")


def forget_peak() -> int:
    """Let the peak begin at what is resident now, and return that."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident()


def resident_peak() -> int:
    """Return the most that was resident since `forget_peak`."""
    return _status("VmHWM")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith(key)) << 10
