"""Selection by name, against a bare loop of `regex.search`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import geutil as ge
from benchmarks.graphs import Case
from benchmarks.timing import Side
from benchmarks.works import Work

LIMIT = 2.0
CONTRIB = "60 us/op, quadratic"


def works(case: Case) -> list[Work]:
    graph, scope = case.graph, case.scope

    def select(regex: str) -> Callable[[Any], Any]:
        return lambda _: ge.select_ops(regex, graph=graph)

    return [
        _work(case, "select_ops, by regex", case.regex, select(case.regex), CONTRIB),
        _work(case, "select_ops, regex of every op", ".", select("."), CONTRIB),
        _work(
            case,
            "get_name_scope_ops",
            f"^{re.escape(scope)}/",
            lambda _: ge.get_name_scope_ops(graph, scope),
        ),
    ]


def _work(
    case: Case, name: str, regex: str, ours: Callable[[Any], Any], contrib: str = ""
) -> Work:
    ops, search = case.ops, re.compile(regex).search
    expected = [op for op in ops if search(op.name)]
    assert expected, f"'{regex}' finds nothing in {case.name}"

    def finds_the_same(found: list[Any]) -> None:
        assert found == expected

    def bare_loop(_: None) -> None:
        for op in ops:
            search(op.name)

    return Work(
        name,
        Side(ours, check=finds_the_same),
        Side(bare_loop),
        LIMIT,
        note=f"{regex} finds {len(expected):,}",
        contrib=contrib,
    )
