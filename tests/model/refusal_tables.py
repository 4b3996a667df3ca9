"""Tables of calls that are refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any


def not_refused(
    error: type[Exception], cases: Iterable[tuple[Any, Callable[[], Any], str]]
) -> dict[str, str]:
    """Return what came of the calls that did not raise an error with their message.

    A case is a name, a call without arguments, and a regular expression.
    """
    wrong = {}
    for name, call, message in cases:
        try:
            wrong[str(name)] = f"it returned {call()!r}"
        except error as caught:
            if not re.search(message, str(caught)):
                wrong[str(name)] = str(caught)
    return wrong
