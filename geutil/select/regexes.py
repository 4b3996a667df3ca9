"""Regular expressions given as strings or compiled."""

from __future__ import annotations

import re

from geutil.errors import SelectionError
from geutil.graph.kinds import type_name


def can_be_regex(obj: object) -> bool:
    """Tell whether `obj` is a string or a compiled regular expression.

    Example:
        >>> import geutil as ge
        >>> ge.can_be_regex("^foo/"), ge.can_be_regex(1)
        (True, False)
    """
    return isinstance(obj, str | re.Pattern)


def make_regex(obj: str | re.Pattern[str]) -> re.Pattern[str]:
    """Return `obj` as a compiled regular expression.

    Raises:
        SelectionError: `obj` is neither a string nor a regular expression, or the
            string is no valid one.

    Example:
        >>> import geutil as ge
        >>> ge.make_regex("^foo/").pattern
        '^foo/'
    """
    if isinstance(obj, re.Pattern):
        return obj
    if not isinstance(obj, str):
        raise SelectionError(f"expected a string or a regex, got {type_name(obj)}")
    try:
        return re.compile(obj)
    except re.error as error:
        raise SelectionError(
            f"'{obj}' is no regular expression ({error}); put a plain name "
            "through re.escape"
        ) from error
