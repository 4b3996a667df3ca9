"""The command that says how much memory a training step needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import tensorflow as tf
import typer

from geutil.cli.files import CommandError, check_page, read_model, write_page
from geutil.cli.options import Force, Html, Json, Signature, Source
from geutil.cli.output import plain, show, show_rows, working
from geutil.gradients import Report, gradients, last_report
from geutil.graph.creation import capture
from geutil.memory import Timeline, predict, worst_case
from geutil.memory.bounds import has_solver
from geutil.model import Model
from geutil.transform import copy_with_input_replacements

if TYPE_CHECKING:
    from geutil.graph.types import Tensor


@dataclass(frozen=True)
class BuiltStep:
    """A step as it would run.

    Attributes:
        fetches: what it is asked for.
        report: what its gradients keep and recompute.
    """

    fetches: tuple[Any, ...]
    report: Report

    def timeline(self) -> Timeline:
        """Return what the step holds, op by op."""
        return predict(self.fetches)

    def worst(self) -> int | None:
        """Return the most it holds under any schedule; None without OR-Tools."""
        return worst_case(self.fetches).peak if has_solver() else None


class TrainingStep:
    """The gradients of the mean square of a model's outputs, and updates by them.

    Args:
        model: the model.
        shapes: the whole shape of each input.

    Raises:
        CommandError: the model has nothing to train, or nothing to train by.
    """

    def __init__(self, model: Model, shapes: Mapping[str, list[int]]) -> None:
        self._weights = [v for v in model.variables.values() if v.trainable]
        if not self._weights:
            raise CommandError(
                "the model has no variables to train: it is frozen; give the one that "
                "it was frozen from"
            )
        if not any(t.dtype.is_floating for t in model.outputs.values()):
            raise CommandError("the model has no floating output to train by")
        self._function = model.to_function().concrete_function
        self._specs = [
            tf.TensorSpec(shapes[name], t.dtype) for name, t in model.inputs.items()
        ]

    def built(self, checkpoints: str | None) -> BuiltStep:
        """Build the step, with plain gradients or with checkpoints."""
        saves = checkpoints is not None

        @tf.function(autograph=False)
        def trace(*inputs: Tensor) -> None:
            loss = self._loss(inputs)
            slopes = gradients(
                loss, self._weights, checkpoints=checkpoints, order=saves
            )
            for weight, slope in zip(self._weights, slopes, strict=True):
                if slope is not None:
                    dense = tf.convert_to_tensor(slope)
                    weight.assign_sub(dense, read_value=False)

        graph = trace.get_concrete_function(*self._specs).graph
        report = last_report(graph)
        return BuiltStep((*graph.outputs, *graph.control_outputs), cast(Report, report))

    def _loss(self, inputs: tuple[Tensor, ...]) -> Tensor:
        results = [r for r in self._inlined(inputs) if r.dtype.is_floating]
        squares = [tf.reduce_mean(tf.square(tf.cast(r, tf.float32))) for r in results]
        return tf.add_n(squares)

    def _inlined(self, inputs: tuple[Tensor, ...]) -> list[Any]:
        """Return the outputs, computed by the model's own ops in the traced graph.

        Inside a call there is nothing that gradients could recompute.
        """
        inner, graph = self._function.graph, tf.compat.v1.get_default_graph()
        captured = [capture(graph, t) for t in self._function.captured_inputs]
        placeholders = {placeholder.op.name for placeholder in inner.inputs}
        _, info = copy_with_input_replacements(
            [op for op in inner.get_operations() if op.name not in placeholders],
            list(zip(inner.inputs, [*inputs, *captured], strict=True)),
            dst_graph=graph,
        )
        return [info.transformed(output) for output in inner.outputs]


_MEGA = 1e6


def memory(
    path: Source,
    batch: Annotated[int, typer.Option(min=1, help="The batch size.")] = 32,
    size: Annotated[
        list[str] | None,
        typer.Option(
            help="input=8,8,3: the shape of an input whose file leaves sizes open.",
            show_default=False,
        ),
    ] = None,
    html: Html = None,
    force: Force = False,
    signature: Signature = None,
    as_json: Json = False,
) -> None:
    """Predict the peak memory of a training step, and what checkpointing saves.

    The step computes the gradients of the mean square of all outputs by all weights
    that are trained, and updates them. Both steps are simulated op by op; variables are
    not counted. The worst case is the most that a step holds under any schedule, with 8
    ops at once.
    """
    shapes = _shapes(size)
    check_page(html, force)
    model = read_model(path, signature)
    from geutil import report

    unknown = sorted(set(shapes) - set(model.inputs))
    if unknown:
        raise CommandError(
            f"there is no input '{unknown[0]}'; the inputs are {list(model.inputs)}"
        )
    known = {
        name: _known(name, t.shape, batch, shapes) for name, t in model.inputs.items()
    }
    step = TrainingStep(model, known)
    with working("planning"):
        plain_step, saving_step = step.built(None), step.built("memory")
    told = saving_step.report
    with working("predicting both steps"):
        before, after = plain_step.timeline(), saving_step.timeline()
        worst, plain_worst = saving_step.worst(), plain_step.worst()
    if html is not None:
        title = f"{path.absolute().name}, a training step"
        write_page(html, lambda: report.memory(before, after, title=title, report=told))
    if as_json:
        peaks = {
            "plain_peak": before.peak,
            "plain_worst": plain_worst,
            "peak": after.peak,
            "worst": worst,
        }
        show({**plain(told), **peaks}, as_json=True)
        return
    rows = [
        ("plain", _mega(before.peak), _mega(plain_worst)),
        ("checkpoints", _mega(after.peak), _mega(worst)),
    ]
    show_rows(["gradients", "peak MB", "worst case MB"], rows, as_json=False)


def _mega(size: int | None) -> str:
    return "needs geutil[plan]" if size is None else f"{size / _MEGA:.4g}"


def _shapes(given: list[str] | None) -> dict[str, list[int]]:
    shapes = {}
    for value in given or ():
        name, mark, sizes = value.partition("=")
        if not mark or not all(part.isdigit() for part in sizes.split(",")):
            raise CommandError(f"'{value}' is no shape; write it as input=8,8,3")
        shapes[name] = [int(part) for part in sizes.split(",")]
    return shapes


def _known(name: str, shape: Any, batch: int, given: dict[str, list[int]]) -> list[int]:
    """Return the sizes of an input, with the batch size where the first is open."""
    if name in given:
        return [batch, *given[name]]
    sizes: list[Any] = [None] if shape.rank is None else shape.as_list()
    filled = [sizes[0] or batch, *sizes[1:]] if shape.rank else sizes
    if None in filled:
        raise CommandError(
            f"input '{name}' has the shape {shape}; pass --size {name}=... with the "
            "sizes behind the batch"
        )
    return filled
