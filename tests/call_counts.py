"""How much work a call is, in calls of functions: no clock, no other process."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any


def count_calls(work: Callable[[], Any]) -> tuple[int, Any]:
    """Return how many functions, C's included, `work` calls, and what it returns.

    The garbage collector is off meanwhile: when it runs depends on what ran before, and
    the finalizers of others' objects would be counted with the work.
    """
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    enabled = gc.isenabled()
    gc.disable()
    sys.setprofile(count)
    try:
        result = work()
    finally:
        sys.setprofile(None)
        if enabled:
            gc.enable()
    return calls, result
