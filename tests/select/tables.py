"""Tables of calls on a sample graph, and one run in all settings.

A row of a table is a call, ` => ` and its result, on one line or more. A call uses the
attributes of the sample (`a` is a tensor, `a.op` its op), its `controls`, which are its
control outputs, and `other`, the same sample in another graph.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from geutil import errors
from geutil.select.selections import ListView
from tests import settings
from tests.graph.building import snapshot
from tests.select.samples import looking

BUILTINS = {
    ge.ArgumentTypeError: TypeError,
    ge.SelectionError: ValueError,
    ge.RerouteError: ValueError,
    ge.CycleError: ValueError,
    ge.TransformError: ValueError,
    errors.FoldError: ValueError,
    ge.StaleGraphError: RuntimeError,
    ge.FinalizedGraphError: RuntimeError,
}
"""The exceptions that code written for `tf.contrib.graph_editor` catches."""


class EachSetting:
    """Every setting of this process; it stands for one in a test."""

    def run(self, body: Callable[[], Any]) -> list[np.ndarray]:
        """Call `body` in each setting; return the values, which are equal in all."""
        values = None
        for name in settings.NAMES:
            print("setting:", name)
            found = settings.Setting(name).run(body)
            values = found if values is None else values
            for one, first in zip(found, values, strict=True):
                np.testing.assert_array_equal(one, first)
        return values


def rows(table: str) -> Iterator[tuple[str, str]]:
    """Yield the call and the result of each row; a line with `#` first is a comment."""
    row = []
    for line in table.strip().splitlines():
        if not line.lstrip().startswith("#"):
            row.append(line.strip())
        if "=>" in line:
            call, result = " ".join(row).split("=>", 1)
            yield call.strip(), result.strip()
            row = []
    assert not row


def check_rows(table: str, check: Callable[[str, str], Any]) -> None:
    """Call `check` with each row, and fail with all the rows that it fails for."""
    wrong = {}
    for call, result in rows(table):
        try:
            check(call, result)
        except (Exception, pytest.fail.Exception) as error:
            wrong[call] = repr(error)
    if wrong:
        pytest.fail("\n".join(f"{call}: {error}" for call, error in wrong.items()))


def check_edits(setting: Any, table: str, check: Callable[[str, str], Any]) -> None:
    """Call `check` with each row, in each setting with a new default graph."""
    check_rows(table, lambda *row: setting.run(lambda: check(*row)))


def evaluate(call: str, sample: Any, **more: Any) -> Any:
    """Return the value of a call on a sample."""
    controls = ge.ControlOutputs(sample.graph)
    scope = {"ge": ge, "np": np, "re": re, "ListView": ListView, "controls": controls}
    return eval(call, {**scope, **vars(sample), **more})


def shown(found: Any) -> str:
    """Return the names of elements or of a view's parts, as a table has them."""
    if isinstance(found, ge.SubGraphView):
        found = (found.ops, found.inputs, found.outputs)
    if isinstance(found, tuple):
        return " | ".join(map(shown, found))
    return " ".join(element.name.removesuffix(":0") for element in found)


def check_found(table: str, sample: Any, **more: Any) -> None:
    """Check the elements that each call returns, in a new list; it adds no op."""

    def check(call: str, result: str) -> None:
        with looking():
            found = evaluate(call, sample, **more)
        assert type(found) in (list, tuple, ge.SubGraphView)
        parts = [part.strip() for part in shown(found).split("|")]
        assert parts == [part.strip() for part in result.split("|")], parts

    check_rows(table, check)


def check_refused(
    graph: tf.Graph,
    call: Callable[[], Any],
    error: type[ge.GeutilError],
    words: Sequence[str] = (),
) -> ge.GeutilError:
    """Check that `call` raises, says why, and leaves `graph` exactly as it was."""
    before = snapshot(graph)
    with pytest.raises(error) as caught:
        call()
    assert isinstance(caught.value, ge.GeutilError)
    assert isinstance(caught.value, BUILTINS[error])
    for word in words:
        assert word in str(caught.value)
    after = snapshot(graph)
    assert after[0] == before[0]
    assert after[1] == before[1]
    return caught.value


def check_refusals(table: str, sample: Any, **more: Any) -> None:
    """Check that each call is refused: `call => SelectionError: word; another word`."""

    def check(call: str, result: str) -> None:
        error, _, words = result.partition(":")
        check_refused(
            sample.graph,
            lambda: evaluate(call, sample, **more),
            getattr(errors, error),
            words.strip().split("; "),
        )

    check_rows(table, check)


def check_cycles(table: str, sample: Any, **more: Any) -> None:
    """Check that each call is refused with the cycle of ops that it would close."""

    def check(call: str, ops: str) -> None:
        error = check_refused(
            sample.graph, lambda: evaluate(call, sample, **more), ge.CycleError
        )
        assert isinstance(error, ge.RerouteError)
        assert error.cycle[0] == error.cycle[-1]
        assert sorted(error.cycle[:-1]) == sorted(ops.split()), error.cycle
        assert " -> ".join(error.cycle) in str(error)

    check_rows(table, check)
