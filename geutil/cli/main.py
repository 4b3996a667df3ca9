"""Where the `geutil` command starts, and ends if something is wrong; its vocabulary."""

from __future__ import annotations

import functools
import logging
import os
import sys
import traceback
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from geutil.cli.guard import guarded
from geutil.errors import GeutilError, spoken_with

VOCABULARY: Mapping[str, str] = MappingProxyType(
    {
        # Parameters that are options.
        "activation_bits=": "--activation-bits",
        "as a float from 0 to 1": "from 0% to 100%",
        "by a mapping from the names of others to types": (
            "by NAME=TYPE for each of the others"
        ),
        "compare(inputs=": "--data with inputs",
        "data=": "--data",
        "in inputs=": "with --input",
        "in outputs=": "with --to",
        "keep=": "--keep",
        "layers=": "--layers",
        "loops=": "--loop",
        "max_ops=": "--max-ops",
        "one of size=": "--size or --noise",
        "ops=": "--ops",
        "overrides=": "`geutil quantize --skip {}`",
        "overwrite=": "--force",
        "pass a mapping from names to tensors": "give names: NAME=TENSOR",
        "pass inputs=": "pass --feed input=tensor",
        "pass statistics=": "pass --keep NAME",
        "rounding=": "--rounding",
        "scheme=": "--scheme",
        "select_tf_ops=": "`geutil convert --tf-ops`",
        "shapes=": "--size input=8,8,3",
        "signature=": "--signature",
        "size=": "--size",
        "timeout=": "--timeout",
        "weight_bits": "--weight-bits",
        "workers=": "--workers",
        # Functions that are commands.
        "Model.set_batch_size(1)": "`geutil batch-size`",
        "Model.unroll()": "`geutil unroll`",
        "cut(outputs=": "`geutil cut --to`",
        "geutil.batchnorm.fold_batch_norms": "`geutil fold`",
        "geutil.model.powers": "`geutil inspect`",
        "geutil.quantize.calibrate": "`geutil calibrate`",
        "geutil.quantize.choose_bits(...).save(path)": "`geutil bits -o`",
        "geutil.quantize.quantize(model, is_training=": "`geutil quantize`",
        "geutil.quantize.to_tflite(model, scheme=": (
            "`geutil quantize --scheme {} -o FILE.tflite`"
        ),
        "it is of another model, or was not made by geutil.quantize.to_int8": (
            "it is of another model, or was not made by `geutil quantize`"
        ),
        "m.find_tensors(regex=": "`geutil ops --regex`",
        "model.cut": "`geutil cut`",
        "model.cut(inputs=": "`geutil cut --input`",
        "quantize(model, scheme=": "`geutil quantize --scheme {}`",
        "rename(inputs=": "`geutil rename --input`",
        "rename(outputs=": "`geutil rename --to`",
        "rename(tensors=": "`geutil rename --tensor '{}=NAME'`",
        "save model.rename(inputs=": "call it otherwise: `geutil rename --input '{}'`",
        "strip(metadata=": "`geutil strip --metadata`",
        "tflite.open": (
            "`geutil inspect`, `view` and `diff` read it, and `geutil run` runs it"
        ),
        # Remedies that the command lacks, and others that it has.
        "geutil.model.open takes their names: outputs=": (
            "no command finds them in it: write a SavedModel"
        ),
        "name tensors with outputs=": "freeze the model with its outputs",
        "name those whose first axis is the batch with inputs=": (
            "Python's `Model.set_batch_size` takes their names"
        ),
        "open": (
            "a SavedModel directory, a .pb or .pbtxt file with a GraphDef, or a .keras "
            "or .h5 file"
        ),
        "pass one of them as an object: it is in m.find_tensors(name=": (
            "Python's `LiteFile.find_tensors` tells them apart"
        ),
        "pass one of these as tags=": "save it again with the tag 'serve'",
        "pass samples=": (
            "`Model.set_batch_size` in Python takes such samples, or skips the proof"
        ),
        "pass verify=": "`Model.set_batch_size` in Python can skip the proof",
        "read a checkpoint with model.restore(path) or assign values": (
            "save it again with values, or freeze it"
        ),
        "save it with format=": "write a SavedModel",
        "saved_model.load": "save it again with a signature",
    }
)
"""Words of the command by the keys of `geutil.errors.Words`."""


_MISSING = (
    "geutil: the command needs typer and rich; install them with "
    "`pip install 'geutil[cli]'`"
)


def main() -> None:
    """Run the command; exit with 0 if it was carried out."""
    sys.exit(guarded(_run, verbose="--verbose" in sys.argv))


def _run() -> int:
    """Run the command with the arguments of the process; return its exit code."""
    # Messages of TensorFlow's C++ part at its start are for its own developers.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        from geutil.cli.commands import app
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
