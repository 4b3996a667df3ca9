"""Where the `geutil` command starts, and where it ends if something is wrong."""

from __future__ import annotations

import functools
import logging
import os
import sys
import traceback
from typing import Any

from geutil.cli.guard import guarded
from geutil.cli.wording import VOCABULARY
from geutil.errors import GeutilError, spoken_with

_MISSING = (
    "geutil: the command needs typer and rich; install them with "
    "`pip install 'geutil[cli]'`"
)


def main() -> None:
    """Run the command; exit with 0 if it was carried out."""
    sys.exit(guarded(_run, verbose="--verbose" in sys.argv))


def _run() -> int:
    """Run the command with the arguments of the process; return its exit code."""
    # What TensorFlow's C++ part says at its start is for its own developers.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        from geutil.cli.app import app
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ("typer", "rich"):
            raise
        print(_MISSING, file=sys.stderr)
        return 1
    return run(app, sys.argv[1:])


def run(app: Any, arguments: list[str]) -> int:
    """Run the command with arguments; return its exit code.

    A refusal of geutil, TensorFlow or the system is reported in one line, and so is an
    unexpected error; with --debug anywhere among the arguments, with its traceback.
    """
    import typer

    debug = "--debug" in arguments
    warnings, logger = _Warnings(logging.WARNING), logging.getLogger("geutil")
    logger.addHandler(warnings)
    # TensorFlow has a handler for all, which would tell them once more.
    propagated, logger.propagate = logger.propagate, False
    everywhere = ("--debug", "--verbose")
    arguments = [argument for argument in arguments if argument not in everywhere]
    command = _command(app)
    try:
        with spoken_with(VOCABULARY):
            result = command.main(arguments, prog_name="geutil", standalone_mode=False)
        # Now, since whoever reads may have gone.
        sys.stdout.flush()
    except typer.TyperException as error:
        _tell(f"{error.format_message().rstrip('.')}; see `{_place(error)} --help`")
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        _tell("stopped")
        return 130
    except Exception as error:
        if debug:
            traceback.print_exc()
        _tell(_said(error))
        return 1
    finally:
        logger.propagate = propagated
        logger.removeHandler(warnings)
    return result if isinstance(result, int) else 0


@functools.cache
def _command(app: Any) -> Any:
    """Return the parser of the command, which takes 50 ms to make."""
    import typer

    return typer.main.get_command(app)


class _Warnings(logging.Handler):
    """Tells warnings of the library as refusals are told, in one line each."""

    def emit(self, record: logging.LogRecord) -> None:
        _tell(record.getMessage())


def _place(error: Any) -> str:
    """Return the command that was called wrongly."""
    return getattr(getattr(error, "ctx", None), "command_path", "geutil")


def _said(error: Exception) -> str:
    if isinstance(error, GeutilError | OSError):
        return str(error)
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}; pass --debug to see where it comes from"


def _tell(message: str) -> None:
    print(f"geutil: {' '.join(message.split())}", file=sys.stderr)
