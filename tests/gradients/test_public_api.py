"""The frozen surfaces of `geutil.gradients` and its tape; see test_public_api.py."""

from geutil import errors, gradients
from geutil.gradients import tape
from tests.documented import check_surface, missing_parts

OTHERS = """
    Budget EncodedTensor GradientError KeptTensor LoopValues MIN_CHECKPOINT_SIZE
    PipelinedStep Plan PlanCurve Policy RecomputedOp Report
"""
SIGNATURES = """
all_of(*policies: Policy) -> Policy
any_of(*policies: Policy) -> Policy
by_name(pattern: str | re.Pattern[str]) -> Policy
by_type(*types: str) -> Policy
capture_ops(graph: Graph | None = None) -> Iterator[list[Operation]]
checkpointed(fn: F, checkpoints: str | Policy | Budget = memory, *, budget: Budget | int
    | float | str | None = None, min_checkpoint_size: int = 1024, offload: bool | Policy
    = False, offload_device: str = /device:CPU:0, prefetch: int = 1, encode: str | None
    = None, device: str | None = None) -> F
encoding_errors(loss: Callable[..., Any], xs: Sequence[Any], *batch: Any, **options:
    Any) -> tuple[GradientError, ...]
explain(ys: Any, xs: Any, grad_ys: Any = None, checkpoints: Any = memory, *,
    min_checkpoint_size: int = 1024, offload: bool | Policy = False, offload_device: str
    = /device:CPU:0, prefetch: int = 1, holds_gradients: bool = False, engine: str |
    TapeEngine = tensorflow, order: bool = True, shapes: GivenShapes | None = None,
    encode: str | None = None, device: str | None = None, **kwargs: Any) -> Report
format_ops(ops: Any, sort_outputs: bool = True) -> list[str]
gradients(ys: Any, xs: Any, grad_ys: Any = None, checkpoints: Any = collection, *,
    min_checkpoint_size: int = 1024, offload: bool | Policy = False, offload_device: str
    = /device:CPU:0, prefetch: int = 1, holds_gradients: bool = False, engine: str |
    TapeEngine = tensorflow, order: bool = True, shapes: GivenShapes | None = None,
    encode: str | None = None, device: str | None = None, **kwargs: Any) -> list[Any]
gradients_collection(ys: Any, xs: Any, grad_ys: Any = None, *args: Any, **kwargs:
    Any) -> list[Any]
gradients_memory(ys: Any, xs: Any, grad_ys: Any = None, *args: Any, **kwargs: Any)
    -> list[Any]
gradients_speed(ys: Any, xs: Any, grad_ys: Any = None, *args: Any, **kwargs: Any) ->
    list[Any]
inside(scope: str) -> Policy
larger_than(size: int) -> Policy
last_report(of: Any = None) -> Report | None
not_(policy: Policy) -> Policy
order_updates(*fetches: Any) -> Report | None
pipelined(loss: Tensor, xs: Any, partition: Partition, inputs: Any, micro_batches: int,
    *, schedule: Schedule = 1f1b, recompute: bool = True, mean: bool = True) ->
    PipelinedStep
plan(ys: Any, xs: Any, budget: Budget | int | float | str, grad_ys: Any = None, *,
    measured: bool = False, offload: bool = False, bandwidth: float | None = None,
    offload_device: str = /device:CPU:0, holds_gradients: bool = False, engine: str |
    TapeEngine = tensorflow, shapes: GivenShapes | None = None, encode: str | None =
    None, device: str | None = None, **kwargs: Any) -> Plan
plan_curve(ys: Any, xs: Any, budgets: Iterable[Budget | int | float | str] = (80%,
    60%, 50%, 40%, 30%, 20%), grad_ys: Any = None, *, holds_gradients: bool =
    False, engine: str | TapeEngine = tensorflow, shapes: GivenShapes | None = None,
    device: str | None = None, **kwargs: Any) -> PlanCurve
toposort(tensors: Iterable[Tensor], within_ops: Iterable[Operation] | None = None)
    -> list[list[Tensor]]
"""
INCOMPLETE = """
    all_of any_of by_name by_type encoding_errors format_ops gradients_collection
    gradients_memory gradients_speed inside larger_than last_report not_
"""
TAPE = """
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
INCOMPLETE_OF_TAPE = """
    Tape Tape.record Tape.export TapeEngine numpy_vspace tensorflow_vspace
"""
FIELDS = {
    "TapeEntry": "op_type output_ids output_shape_and_dtype input_ids "
    "backward_function",
    "VSpace": "aggregate_fn num_elements_fn tensor_id zeros ones_like",
}


def test_the_public_surface():
    check_surface(gradients, OTHERS, SIGNATURES, INCOMPLETE.split())


def test_the_public_surface_of_the_tape():
    check_surface(tape, "TapeEntry TapeError VSpace", TAPE, INCOMPLETE_OF_TAPE.split())
    assert {n: " ".join(getattr(tape, n)._fields) for n in FIELDS} == FIELDS
    assert tape.TapeError is errors.TapeError
    for member in (tape.Tape, tape.TapeEngine, tape.VSpace, tape.numpy_vspace):
        assert missing_parts(member, raises=False, cost=False) == [], member
