"""The public surface of `geutil.memory`, frozen; see tests/test_public_api.py."""

from geutil import memory
from tests.documented import check_surface

OTHERS = """
    BatchFit Cut DeviceMeasurement DeviceMemory Environment Lifetime LiveTensor
    Measurement MemoryByDevice Moment Node Pipeline PipelineRun Program Simulation
    Stage Timeline TimelineComparison WorstCase
"""
SIGNATURES = """
bytes_of(tensor: Tensor, shapes: GivenShapes | None = None) -> int | None
compare(before: Timeline | Measurement, after: Timeline | Measurement) ->
    TimelineComparison
execution_order(program: Program, seed: int | None = None) -> list[int]
largest_batch(step: Callable[[int], Any], memory: int | str, *, most: int = 1048576,
    resident: bool = False, device: str | None = None) -> BatchFit
measure(what: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None =
    None, *, steps: int = 3, session: Any = None, inter_op_threads: int | None = 1,
    intra_op_threads: int | None = None, grappler: bool = True, onednn: bool | None =
    None, jit_compile: bool = False, timeout: float | None = None) -> Measurement
predict(ys_or_fetches: Any, *, feeds: Iterable[Tensor] | None = None, order:
    Iterable[Operation] | None = None, shapes: GivenShapes | None = None, grappler: bool
    = True, onednn: bool | None = None, device: str | None = None) -> Timeline
predict_by_device(ys_or_fetches: Any, *, feeds: Iterable[Tensor] | None = None, shapes:
    GivenShapes | None = None, default: str | None = None, worst: bool = False, threads:
    int | None = 8, measured: Measurement | None = None, grappler: bool = True, onednn:
    bool | None = None) -> MemoryByDevice
simulate(program: Program | Pipeline, order: Sequence[int] | None = None, *, seed: int |
    None = None) -> Simulation | PipelineRun
step_program(ys_or_fetches: Any, *, feeds: Iterable[Tensor] | None = None, shapes:
    GivenShapes | None = None, grappler: bool = False) -> Program
worst_case(ys_or_fetches: Any, *, feeds: Iterable[Tensor] | None = None, shapes:
    GivenShapes | None = None, threads: int | None = 8, grappler: bool = True, onednn:
    bool | None = None, device: str | None = None) -> WorstCase
"""
SHORT = {"bytes_of", "execution_order", "simulate", "step_program"}


def test_the_public_surface():
    check_surface(memory, OTHERS, SIGNATURES, SHORT)
