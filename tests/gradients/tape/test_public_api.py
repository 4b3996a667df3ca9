"""The surface of `geutil.gradients.tape`, frozen; see tests/test_public_api.py."""

import geutil as ge
from geutil.gradients import tape
from tests.documented import check_surface, missing_parts

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
INCOMPLETE = """
    Tape Tape.record Tape.export TapeEngine numpy_vspace tensorflow_vspace
"""
FIELDS = {
    "TapeEntry": "op_type output_ids output_shape_and_dtype input_ids "
    "backward_function",
    "VSpace": "aggregate_fn num_elements_fn tensor_id zeros ones_like",
}


def test_the_public_surface():
    check_surface(tape, "TapeEntry TapeError VSpace", SIGNATURES, INCOMPLETE.split())
    assert {n: " ".join(getattr(tape, n)._fields) for n in FIELDS} == FIELDS
    assert tape.TapeError is ge.errors.TapeError
    for member in (tape.Tape, tape.TapeEngine, tape.VSpace, tape.numpy_vspace):
        assert missing_parts(member, raises=False, cost=False) == [], member
