"""The command that says how much memory a training step needs."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from geutil.cli import terminal
from geutil.cli.files import (
    CommandError,
    check_page,
    check_source,
    read_model,
    write_page,
)
from geutil.cli.terminal import Size, optional, plain, show, show_rows, working
from geutil.progress import counted
from geutil.sizes import byte_count

if TYPE_CHECKING:
    from geutil.gradients import PlanCurve, Report
    from geutil.memory import Timeline

_logger = logging.getLogger("geutil")


def memory(
    path: terminal.Source,
    batch: Annotated[int, typer.Option(min=1, help="The batch size.")] = 32,
    size: Annotated[
        list[str] | None,
        optional("input=8,8,3: the shape of an input whose file leaves sizes open."),
    ] = None,
    budget: Annotated[
        str | None,
        optional(
            "1.5GB, or 50% of plain: the least computing within that, in place of "
            "the least memory."
        ),
    ] = None,
    extra_time: Annotated[
        str | None, optional("20%: the least memory within so much more time.")
    ] = None,
    available: Annotated[
        str | None,
        optional(
            "8GB: with --largest-batch, what the step and the variables fit into.",
            "--memory",
        ),
    ] = None,
    largest: Annotated[
        bool,
        typer.Option(
            "--largest-batch", help="Say how large a batch fits into --memory."
        ),
    ] = False,
    curve: Annotated[
        bool,
        typer.Option(
            "--curve", help="Say what less memory costs in time, for several budgets."
        ),
    ] = False,
    device: Annotated[
        str | None,
        optional("GPU:0: where the step is to run; there need be none here."),
    ] = None,
    html: terminal.Html = None,
    force: terminal.Force = False,
    signature: terminal.Signature = None,
    as_json: terminal.Json = False,
) -> None:
    """Predict the peak memory of a training step, and what checkpointing saves.

    The step computes the gradients of the mean square of all outputs by all weights
    that are trained, and updates them. Both steps are simulated op by op; variables are
    not counted. The worst case is the most that a step holds under any schedule, with 8
    ops at once. With --device GPU:0 the bytes are those of the GPU's memory, and
    "chunks" what TensorFlow's allocator hands out for them; workspaces of cuDNN come on
    top.
    """
    if largest != (available is not None):
        raise CommandError("--largest-batch and --memory 8GB belong together")
    if largest and curve:
        raise CommandError("--largest-batch and --curve are two questions: ask one")
    if budget is not None and extra_time is not None:
        raise CommandError("--budget and --extra-time are two questions: ask one")
    if largest and (budget is not None or extra_time is not None):
        raise CommandError("--largest-batch has a limit, --memory: leave out others")
    _check_amounts(budget, extra_time, available)
    _check_device(device)
    shapes = given_shapes(size)
    check_page(html, force)
    check_source(path)
    # A wrong device is refused before the model is read.
    if device is not None:
        from geutil.memory.read import device_of

        device_of(device)
    model = read_model(path, signature, values=False)
    from geutil import report
    from geutil.cli.training_step import TrainingStep
    from geutil.gradients import Budget

    check_inputs(model, shapes)
    if available is not None:
        _show_largest(model, shapes, available, device, as_json)
        return
    sizes = input_shapes(model, batch, shapes)
    wanted = budget is not None or extra_time is not None
    checkpoints = Budget(budget, extra_time=extra_time) if wanted else "memory"
    step = TrainingStep(model, sizes, device)
    with working("planning"):
        plain_step, saving_step = step.built(None), step.built(checkpoints)
    gradient_report = saving_step.report
    plans = None
    if curve:
        with working("planning for several budgets"):
            plans = step.curve(budget)
    with working("predicting both steps"):
        before, after = plain_step.timeline(), saving_step.timeline()
        worst, plain_worst = saving_step.worst(), plain_step.worst()
    # Grappler may make more of a step than of the one that was planned.
    notes = [
        *_over_budget(gradient_report, after),
        *_above_plain(before.peak, plain_worst, after.peak, worst),
    ]
    for note in notes:
        _logger.warning("%s", note)
    if html is not None:
        title = f"{path.absolute().name}, a training step"
        write_page(
            html,
            lambda: report.memory(
                before, after, title=title, report=gradient_report, curve=plans
            ),
        )
    if as_json:
        peaks = {
            "plain_peak": before.peak,
            "plain_worst": plain_worst,
            "peak": after.peak,
            "worst": worst,
        }
        # Only the allocator of a GPU holds memory in chunks.
        if after.extent is not None:
            peaks |= {"plain_chunks": before.resident, "chunks": after.resident}
        told = {**plain(gradient_report), **peaks}
        told["warnings"] = [*told["warnings"], *notes]
        show(told if plans is None else {**told, "curve": plain(plans)}, as_json=True)
        return
    columns = ["gradients", "peak", "worst case"]
    rows = [
        ["plain", _size(before.peak), _size(plain_worst)],
        ["checkpoints", _size(after.peak), _size(worst)],
    ]
    if after.extent is not None:
        columns.insert(2, "chunks")
        for row, timeline in zip(rows, (before, after), strict=True):
            row.insert(2, _size(timeline.resident))
    show_rows(columns, rows, as_json=False)
    if plans is not None:
        _show_curve(plans)


def _over_budget(report: Report, step: Timeline) -> list[str]:
    """Return a warning if the step takes more than its budget."""
    taken, budget = max(step.peak, step.resident or 0), report.budget
    if budget is None or taken <= budget:
        return []
    over = f"the step takes {taken:,} bytes at its peak, more than the budget of"
    return [f"{over} {budget:,}: pass a smaller budget"]


def _above_plain(
    plain_peak: int, plain_worst: int | None, peak: int, worst: int | None
) -> list[str]:
    """Return a warning if plain gradients hold less."""
    if peak <= plain_peak:
        return []
    is_lower = worst is not None and plain_worst is not None and worst < plain_worst
    but = ", unless the worst case counts, which is lower with them" if is_lower else ""
    held = f"with checkpoints the step holds {peak:,} bytes at its peak, with plain"
    return [f"{held} gradients {plain_peak:,}: leave them plain{but}"]


_SHARE = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*%\s*")


def _check_amounts(
    budget: str | None, extra_time: str | None, available: str | None
) -> None:
    """Refuse amounts that are none, before TensorFlow is started."""
    if budget is not None and not (_SHARE.fullmatch(budget) or byte_count(budget)):
        raise CommandError(
            f"--budget {budget} is no budget; pass bytes such as 1.5GB, or a share of "
            "what plain gradients hold, such as 50%"
        )
    if extra_time is not None and not _SHARE.fullmatch(extra_time):
        raise CommandError(
            f"--extra-time {extra_time} is no part of a time; pass one such as '20%'"
        )
    if available is not None and not byte_count(available):
        raise CommandError(f"--memory {available} is no amount; pass bytes such as 8GB")


_DEVICE_PART = re.compile(
    r"(job:.+|(replica|task):\d+|(device:)?(cpu|gpu)(:(\d+|\*))?)?", re.IGNORECASE
)


def _check_device(device: str | None) -> None:
    """Refuse devices that no step is predicted for, before TensorFlow is started."""
    if device is not None and not all(map(_DEVICE_PART.fullmatch, device.split("/"))):
        raise CommandError(
            f"--device {device} is no device that this TensorFlow has kernels for; "
            "pass CPU:0 or GPU:0"
        )


def _show_curve(curve: PlanCurve) -> None:
    """Show the plan of each budget, and the budgets that have none."""
    rows: list[tuple[Any, ...]] = [
        (
            _size(plan.budget),
            _size(plan.peak),
            f"{100 * plan.extra_time:.1f}%",
            sum(map(len, plan.bursts)),
            plan.looping,
        )
        for plan in curve.plans
    ]
    rows += [(_size(budget), "no plan found", "", "", "") for budget in curve.unmet]
    columns = ["budget", "peak", "extra time", "ops that run again", "loops"]
    print()
    show_rows(columns, rows, as_json=False)


def _show_largest(
    model: Any,
    shapes: dict[str, list[int]],
    available: str,
    device: str | None,
    as_json: bool,
) -> None:
    """Show the largest batch that fits, in each way of taking gradients."""
    from geutil.cli.training_step import WAYS, BatchSizes
    from geutil.memory.step_prediction import checked_limit

    limit = checked_limit(available)
    sizes = BatchSizes(
        model, lambda rows: input_shapes(model, rows, shapes), limit, device
    )
    fits = list(counted(sizes.fits(), WAYS, None, "looking for the largest batch"))
    if as_json:
        columns = ["gradients", "largest_batch", "bytes_with_variables"]
        told = [(name, fit.batch, fit.bytes) for name, fit in fits]
        show_rows(columns, told, as_json=True)
        return
    rows = [(name, fit.batch, _size(fit.bytes)) for name, fit in fits]
    show_rows(["gradients", "largest batch", "with variables"], rows, as_json=False)


def check_inputs(model: Any, shapes: dict[str, list[int]]) -> None:
    """Refuse shapes of inputs that a model does not have."""
    unknown = sorted(set(shapes) - set(model.inputs))
    if unknown:
        raise CommandError(
            f"there is no input '{unknown[0]}'; the inputs are {list(model.inputs)}"
        )


def input_shapes(
    model: Any, batch: int, shapes: dict[str, list[int]]
) -> dict[str, list[int]]:
    """Return the whole shape of each input."""
    return {
        name: _known(name, t.shape, batch, shapes) for name, t in model.inputs.items()
    }


def _size(count: int | None) -> Size | str:
    return "needs geutil[plan]" if count is None else Size(count)


def given_shapes(size_options: list[str] | None) -> dict[str, list[int]]:
    """Return the shapes that options such as input=8,8,3 give."""
    shapes = {}
    for value in size_options or ():
        name, mark, sizes = value.partition("=")
        if not mark or not all(part.isdigit() for part in sizes.split(",")):
            raise CommandError(f"'{value}' is no shape; write it as input=8,8,3")
        shapes[name] = [int(part) for part in sizes.split(",")]
    return shapes


def _known(
    name: str, shape: Any, batch: int, shape_by_name: dict[str, list[int]]
) -> list[int]:
    """Return the sizes of an input, with the batch size where the first is open."""
    if name in shape_by_name:
        return [batch, *shape_by_name[name]]
    sizes: list[Any] = [None] if shape.rank is None else shape.as_list()
    filled = [sizes[0] or batch, *sizes[1:]] if shape.rank else sizes
    if None in filled:
        raise CommandError(
            f"input '{name}' has the shape {shape}; pass --size {name}=... with the "
            "sizes behind the batch"
        )
    return filled
