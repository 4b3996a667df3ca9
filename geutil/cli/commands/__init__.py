"""The `geutil` command and its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from geutil.cli.commands import changes, looks, memory, quantization, runs
from geutil.version import __version__

app = typer.Typer(
    name="geutil",
    help="Graph surgery for TensorFlow models.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(requested: bool) -> None:
    if requested:
        print(__version__)
        raise typer.Exit


@app.callback()
def _everywhere(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version."
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks of errors.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Show what TensorFlow's converters say."),
    ] = False,
) -> None:
    """Graph surgery for TensorFlow models."""
    if context.invoked_subcommand is None:
        print(context.get_help())


_COMMANDS: dict[str, Callable[..., Any]] = {
    "inspect": looks.inspect,
    "ops": looks.ops,
    "cut": changes.cut,
    "split": changes.split,
    "expose": changes.expose,
    "splice": changes.splice,
    "rename": changes.rename,
    "batch-size": changes.batch_size,
    "strip": changes.strip,
    "unroll": changes.unroll,
    "fold": changes.fold,
    "bits": quantization.bits,
    "quantize": quantization.quantize,
    "calibrate": quantization.calibrate,
    "memory": memory.memory,
    "convert": runs.convert,
    "run": runs.run,
    "batch": runs.batch,
    "diff": looks.diff,
    "check": looks.check,
    "view": looks.view,
}
for _name, _function in _COMMANDS.items():
    app.command(_name)(_function)
