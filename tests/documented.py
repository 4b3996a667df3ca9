"""What the docstrings of public names must hold."""

import inspect
import operator
import re
from collections.abc import Iterable
from typing import Any


def missing_parts(member: Any, *, raises: bool, cost: bool) -> list[str]:
    """Return the parts that a docstring should have and has not."""
    text = inspect.getdoc(member) or ""
    wanted = {"Example": r"^Example:\n    >>> "}
    if raises:
        wanted["Raises"] = r"^Raises:\n    \w"
    if cost:
        wanted["Cost"] = r"^Cost: \w"
    return [part for part, regex in wanted.items() if not re.search(regex, text, re.M)]


def signature(member: Any) -> str:
    """Return a signature with its annotations, as one line."""
    return re.sub(r"\s+", " ", str(inspect.signature(member))).replace("'", "")


def frozen(signatures: str) -> dict[str, str]:
    """Return a table of signatures by name; an indented line continues one."""
    lines = signatures.replace("\n    ", " ").strip().splitlines()
    return {re.match(r"[\w.]+", line)[0]: line for line in lines}


def check_surface(
    module: Any, others: str, signatures: str, incomplete: Iterable[str] = ()
) -> None:
    """Check what a module exports, signatures, and that docstrings are whole.

    Args:
        module: the module.
        others: the names of what has no signature in the table.
        signatures: the table, for `frozen`; it names every function.
        incomplete: names of the table whose docstrings need no errors and costs.
    """
    table = frozen(signatures)
    members = {name: operator.attrgetter(name)(module) for name in table}
    listed = {name.partition(".")[0] for name in table}
    assert listed.isdisjoint(others.split())
    assert sorted(module.__all__) == sorted([*listed, *others.split()])
    public = {name: getattr(module, name) for name in module.__all__}
    assert {n for n, member in public.items() if inspect.isfunction(member)} <= listed
    assert {n: f"{n}{signature(member)}" for n, member in members.items()} == table
    missing = {
        name: missing_parts(member, raises=True, cost=True)
        for name, member in members.items()
        if name not in incomplete
    }
    assert {name: parts for name, parts in missing.items() if parts} == {}
    documented = filter(inspect.isroutine, public.values())
    documented = [*documented, *filter(inspect.isclass, public.values())]
    assert [member for member in documented if not inspect.getdoc(member)] == []
