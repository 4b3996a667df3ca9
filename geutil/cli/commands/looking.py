"""Commands that look at models."""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated, Any

import typer

from geutil.cli.files import read_model
from geutil.cli.options import Json, Signature, Source
from geutil.cli.output import plain, show, show_rows, working

_SHOWN = 12


def inspect(path: Source, as_json: Json = False) -> None:
    """Show what is in a model: ops, inputs, outputs, variables, functions, size."""
    import geutil.model

    with working(f"reading {path.name}"):
        found = geutil.model.inspect(str(path))
    if as_json:
        show({**plain(found), "scopes": _scopes(path)}, as_json=True)
        return
    print(found)
    scopes = _scopes(path)
    if scopes:
        print(f"ops by scope: {len(scopes)} scope(s)")
        for scope, count in list(scopes.items())[:_SHOWN]:
            print(f"  {scope}: {count}")
        if len(scopes) > _SHOWN:
            print(f"  and {len(scopes) - _SHOWN} more")


def _scopes(path: Any) -> dict[str, int]:
    """Return how many ops each outermost scope holds, the largest first."""
    model = read_model(path)
    names = (op.name for op in model.graph.get_operations() if "/" in op.name)
    return dict(Counter(name.partition("/")[0] for name in names).most_common())


def ops(
    path: Source,
    regex: Annotated[
        str | None, typer.Option(help="Only ops whose names hold this.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--type", help="Only ops of this type.")
    ] = None,
    scope: Annotated[
        str | None, typer.Option(help="Only ops of this name scope.")
    ] = None,
    signature: Signature = None,
    as_json: Json = False,
) -> None:
    """List the ops of a model, one a line: name, type, shapes of the results."""
    from geutil.graph.names import is_in_scope
    from geutil.select import make_regex

    pattern: re.Pattern[str] | None = None if regex is None else make_regex(regex)
    model = read_model(path, signature)
    found = [
        op
        for op in model.graph.get_operations()
        if (pattern is None or pattern.search(op.name))
        and (kind is None or op.type == kind)
        and is_in_scope(op.name, scope)
    ]
    rows = (
        (op.name, op.type, ", ".join(str(t.shape) for t in op.outputs)) for op in found
    )
    show_rows(["name", "type", "shapes"], rows, as_json=as_json)
