"""The command that says what a training step needs in memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

import typer

from geutil.cli.files import CommandError, read_model
from geutil.cli.options import Force, Html, Json, Signature, Source
from geutil.cli.output import plain, show, show_rows, working
from geutil.cli.pages import check_page, write_page

T = TypeVar("T")

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
    not counted.
    """
    shapes = _shapes(size)
    check_page(html, force)
    model = read_model(path, signature)
    import tensorflow as tf

    from geutil import report
    from geutil.gradients import explain, gradients
    from geutil.memory import Timeline, predict

    weights = [v for v in model.variables.values() if v.trainable]
    if not weights:
        raise CommandError(
            f"'{path}' has no variables to train: it is frozen; give the model that it "
            "was frozen from"
        )
    unknown = sorted(set(shapes) - set(model.inputs))
    if unknown:
        raise CommandError(
            f"there is no input '{unknown[0]}'; the inputs are {list(model.inputs)}"
        )
    function = model.to_function()

    def loss() -> tf.Tensor:
        given = {
            name: tf.zeros(_known(name, t.shape, batch, shapes), t.dtype)
            for name, t in model.inputs.items()
        }
        results = [r for r in _inlined(function, given) if r.dtype.is_floating]
        if not results:
            raise CommandError(f"'{path}' has no floating output to train by")
        squares = [tf.reduce_mean(tf.square(tf.cast(r, tf.float32))) for r in results]
        return tf.add_n(squares)

    def timeline(checkpoints: str | None) -> Timeline:
        slopes = gradients(loss(), weights, checkpoints=checkpoints)
        updates = [
            w.assign_sub(tf.convert_to_tensor(slope), read_value=False)
            for w, slope in zip(weights, slopes, strict=True)
            if slope is not None
        ]
        return predict(updates)

    with working("planning"):
        told = _traced(lambda: explain(loss(), weights))
    with working("predicting both steps"):
        before, after = (_traced(partial(timeline, way)) for way in (None, "memory"))
    if html is not None:
        title = f"{path.absolute().name}, a training step"
        write_page(html, lambda: report.memory(before, after, title=title, report=told))
    if as_json:
        peaks = {"plain_peak": before.peak, "peak": after.peak}
        show({**plain(told), **peaks}, as_json=True)
        return
    rows = [
        ("plain", f"{before.peak / _MEGA:.4g}"),
        ("checkpoints", f"{after.peak / _MEGA:.4g}"),
    ]
    show_rows(["gradients", "peak MB"], rows, as_json=False)


def _inlined(function: Any, inputs: dict[str, Any]) -> list[Any]:
    """Return a model's outputs, computed by its own ops in the graph being traced.

    Inside a call there is nothing that gradients could recompute.
    """
    import tensorflow as tf

    from geutil.transform import copy_with_input_replacements

    concrete = function.concrete_function
    graph = tf.compat.v1.get_default_graph()
    captured = [graph.capture(outside) for outside in concrete.captured_inputs]
    placeholders = concrete.graph.inputs
    given = [*inputs.values(), *captured]
    inner = {placeholder.op.name for placeholder in placeholders}
    _, info = copy_with_input_replacements(
        [op for op in concrete.graph.get_operations() if op.name not in inner],
        list(zip(placeholders, given, strict=True)),
        dst_graph=graph,
    )
    return [info.transformed(output) for output in concrete.graph.outputs]


def _traced(build: Callable[[], T]) -> T:
    """Call a function while a `tf.function` is traced, and return what it returns."""
    import tensorflow as tf

    made: list[T] = []

    @tf.function(autograph=False)
    def trace() -> None:
        made.append(build())

    trace.get_concrete_function()
    return made[0]


def _shapes(given: list[str] | None) -> dict[str, list[int]]:
    shapes = {}
    for value in given or ():
        name, mark, sizes = value.partition("=")
        if not mark or not all(part.isdigit() for part in sizes.split(",")):
            raise CommandError(f"'{value}' is no shape; write it as input=8,8,3")
        shapes[name] = [int(part) for part in sizes.split(",")]
    return shapes


def _known(
    name: str, shape: Any, batch: int, given: dict[str, list[int]]
) -> list[int | None]:
    """Return the sizes of an input, with the batch size where the first is open."""
    if name in given:
        return [batch, *given[name]]
    sizes = [None] if shape.rank is None else shape.as_list()
    filled = [sizes[0] or batch, *sizes[1:]] if shape.rank else sizes
    if None in filled:
        raise CommandError(
            f"input '{name}' has the shape {shape}; pass --size {name}=... with the "
            "sizes behind the batch"
        )
    return filled
