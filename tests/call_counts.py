"""How much work a call is, in calls of functions: no clock, no other process."""

import cProfile
from collections.abc import Callable
from typing import Any

from geutil.graph.runtime import without_collector


def count_calls(work: Callable[[], Any]) -> tuple[int, Any]:
    """Return how many functions, C's included, `work` calls, and what it returns.

    The garbage collector is off meanwhile: when it runs depends on what ran before, and
    the finalizers of others' objects would be counted with the work.
    """
    profile = cProfile.Profile()
    with without_collector():
        result = profile.runcall(work)
    return sum(entry.callcount for entry in profile.getstats()), result
