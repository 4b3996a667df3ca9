"""The command that says what a training step needs in memory."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from geutil.cli.files import CommandError, read_model
from geutil.cli.options import Json, Signature, Source
from geutil.cli.output import show, show_rows, working

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
    signature: Signature = None,
    as_json: Json = False,
) -> None:
    """Predict the peak memory of a training step, and what checkpointing saves.

    The step computes the gradients of the mean square of all outputs by all weights
    that are trained.
    """
    shapes = _shapes(size)
    model = read_model(path, signature)
    import tensorflow as tf

    from geutil.gradients import Report, explain

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
    reports: list[Report] = []

    @tf.function(autograph=False)
    def step() -> None:
        given = {
            name: tf.zeros(_known(name, t.shape, batch, shapes), t.dtype)
            for name, t in model.inputs.items()
        }
        results = [r for r in function(**given).values() if r.dtype.is_floating]
        if not results:
            raise CommandError(f"'{path}' has no floating output to train by")
        squares = [tf.reduce_mean(tf.square(tf.cast(r, tf.float32))) for r in results]
        loss = tf.add_n(squares)
        reports.append(explain(loss, weights))

    with working("predicting"):
        step.get_concrete_function()
    (report,) = reports
    if as_json:
        show(report, as_json=True)
        return
    rows = [
        ("plain", f"{report.plain_peak / _MEGA:.1f}"),
        ("checkpoints", f"{report.peak / _MEGA:.1f}"),
    ]
    show_rows(["gradients", "peak MB"], rows, as_json=False)


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
