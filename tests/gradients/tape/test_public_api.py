"""The surface of `geutil.gradients.tape`, frozen; see tests/test_public_api.py."""

from __future__ import annotations

import inspect

import geutil as ge
from geutil.gradients import tape
from tests.documented import frozen, missing_parts, signature

NAMES = """
    Tape TapeEngine TapeEntry TapeError VSpace imperative_grad numpy_vspace
    tensorflow_vspace
"""
SIGNATURES = """
Tape() -> None
Tape.record(self, op_type: str, outputs: Sequence[Any], inputs: Sequence[Any],
    backward_function: Backward) -> None
Tape.export(self) -> tuple[dict[int, int], dict[int, TapeEntry]]
Tape.from_graph(ys: Sequence[Tensor], xs: Sequence[Any], wrap: Callable[[Backward],
    Backward] | None = None) -> Tape
TapeEngine(min_aggregate_count: int = 4, min_aggregate_bytes: int = 134217728) -> None
imperative_grad(vspace: VSpace, tape: Tape, target: Sequence[Any], sources:
    Sequence[Any], output_gradients: Sequence[Any] | None = None, *,
    min_aggregate_count: int = 4, min_aggregate_bytes: int = 134217728) -> list[Any]
numpy_vspace() -> VSpace
tensorflow_vspace() -> VSpace
"""
FROZEN = frozen(SIGNATURES)


def member(name):
    found = tape
    for part in name.split("."):
        found = getattr(found, part)
    return found


FIELDS = {
    "TapeEntry": "op_type output_ids output_shape_and_dtype input_ids "
    "backward_function",
    "VSpace": "aggregate_fn num_elements_fn tensor_id zeros ones_like",
}


def test_names_signatures_and_fields():
    assert sorted(tape.__all__) == sorted(NAMES.split())
    found = {name: f"{name}{signature(member(name))}" for name in FROZEN}
    assert found == FROZEN
    assert {n: " ".join(member(n)._fields) for n in FIELDS} == FIELDS
    listed = {name.partition(".")[0] for name in FROZEN}
    assert listed == set(NAMES.split()) - {"TapeError", *FIELDS}
    assert tape.TapeError is ge.errors.TapeError


def test_docstrings():
    missing = {n: "all" for n in tape.__all__ if not inspect.getdoc(member(n))}
    for name in ("imperative_grad", "Tape.from_graph"):
        missing[name] = missing_parts(member(name), raises=True, cost=True)
    for name in ("Tape", "TapeEngine", "VSpace", "numpy_vspace"):
        missing[name] = missing_parts(member(name), raises=False, cost=False)
    assert {name: parts for name, parts in missing.items() if parts} == {}
