"""Names of nodes that move from a function body into the graph that calls it.

A body keeps its own names where they are free, below the scope that the call was given.
Where they are not, the whole body moves into a scope that is named after its function.
Automatic names, such as `NoOp` or `Identity_2`, are worth no scope: they get another
number, unless they are most of what the body has.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from geutil.graph.names import scope_basename, scope_dirname
from geutil.graph.op_types import CALLS

_NUMBER = re.compile(r"_\d+$")
_VERSION = re.compile(r"v\d+$")
_ILLEGAL = re.compile(r"[^A-Za-z0-9_.-]+")
_KIND = re.compile(r"^__(inference|forward|backward)_(?=.)")
_LONGEST = 1000


def is_automatic(name: str, op: str) -> bool:
    """Tell whether a name says no more than the type of its op.

    Example:
        >>> from geutil.graph.inlining.names import is_automatic
        >>> is_automatic("add_3", "AddV2"), is_automatic("conv/add_3", "AddV2")
        (True, False)
    """
    plain = _NUMBER.sub("", name).replace("_", "").lower()
    return "/" not in name and plain == _VERSION.sub("", op.replace("_", "").lower())


def call_scope(name: str, op: str) -> str:
    """Return the scope that a call gives its body: its name, unless it is automatic.

    A name of more than a thousand characters is none that anybody reads: below it, the
    scopes start anew.
    """
    if len(name) > _LONGEST:
        return ""
    basename = scope_basename(name)
    plain = _NUMBER.sub("", basename)
    if plain in CALLS or plain in (op, readable(op)) or basename == op:
        return scope_dirname(name)
    return f"{name}/"


def readable(function: str) -> str:
    """Return the name that a function had in its source, fit for a scope.

    Example:
        >>> from geutil.graph.inlining.names import readable
        >>> readable("__inference_dense_layer_call_fn_1234")
        'dense_layer_call_fn'
    """
    name = function
    while _KIND.match(name):
        name = _NUMBER.sub("", _KIND.sub("", name))
    name = _ILLEGAL.sub("_", name).strip("_.-")
    return name or "call"


@dataclass(frozen=True)
class Claim:
    """A body that asks for names.

    Attributes:
        scope: the scope to put it in, with a slash at its end, or nothing.
        fallback: the name of the scope below that for when names are taken.
        names: the names of its nodes, as the body has them.
        automatic: those among them that say nothing.
        mostly_automatic: whether that holds for most nodes, callees' included.
    """

    scope: str
    fallback: str
    names: Sequence[str]
    automatic: frozenset[str]
    mostly_automatic: bool


class Namespace:
    """The names that are taken in a graph."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self._scopes: set[str] = set()
        self._numbers: dict[str, int] = {}

    def unique(self, name: str) -> str:
        """Take `name`, or the next free one with a number."""
        if name in self._taken:
            name = self._next(_NUMBER.sub("", name), self._taken)
        self._taken.add(name)
        return name

    def claim(self, claims: Sequence[Claim]) -> list[dict[str, str]]:
        """Return the name in the graph of each node of each body.

        Bodies that stand in each other's way are treated alike: all of them move.

        Cost: linear in the names, but for scopes that are taken by chance.
        """
        wanted = Counter(c.scope + name for c in claims for name in c.names)
        return [self._claim(c, wanted) for c in claims]

    def _claim(self, claim: Claim, wanted: Counter[str]) -> dict[str, str]:
        scope = claim.scope
        clashes = [
            name
            for name in claim.names
            if scope + name in self._taken or wanted[scope + name] > 1
        ]
        if clashes and (
            claim.mostly_automatic or not claim.automatic.issuperset(clashes)
        ):
            scope = self._free_scope(scope + claim.fallback, claim.names)
        # Those that keep their names take them before a numbered one can.
        kept = [n for n in claim.names if scope + n not in self._taken]
        result = dict.fromkeys(claim.names, "")
        for name in kept:
            result[name] = scope + name
            self._taken.add(scope + name)
        for name in claim.names:
            result[name] = result[name] or self.unique(scope + name)
        return result

    def _free_scope(self, scope: str, names: Sequence[str]) -> str:
        while (
            scope in self._scopes
            or scope in self._taken
            or any(f"{scope}/{name}" in self._taken for name in names)
        ):
            scope = self._next(_NUMBER.sub("", scope), self._scopes)
        self._scopes.add(scope)
        return f"{scope}/"

    def _next(self, base: str, taken: set[str]) -> str:
        """Return the first name with a number that is not in `taken`."""
        number = self._numbers.get(base, 0) + 1
        while f"{base}_{number}" in taken:
            number += 1
        self._numbers[base] = number
        return f"{base}_{number}"
