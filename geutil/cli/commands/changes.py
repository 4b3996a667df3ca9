"""Commands that change models: a model is read, and another one is written.

TFLite files are edited without TensorFlow: ops, weights and names are theirs.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from geutil.cli import files, terminal
from geutil.cli.files import CommandError, Record, Written, tell
from geutil.cli.terminal import ModelFormat, optional, plain, show, working
from geutil.errors import TFLiteError, spoken_with, vocabulary

if TYPE_CHECKING:
    from geutil.model import Model
    from geutil.tflite import LiteFile, LiteGraph, LiteTensor

Pairs = Annotated[list[str] | None, optional("old=new; can be given several times.")]


def cut(
    path: terminal.SourceOrLite,
    output: terminal.Target,
    inputs: terminal.Inputs = None,
    outputs: Annotated[
        list[str] | None,
        optional(
            "A tensor or op that becomes an output; name=tensor also names it.", "--to"
        ),
    ] = None,
    ops: Annotated[
        str | None,
        optional("START:END, places of ops of a .tflite file, in the place of both."),
    ] = None,
    signature: terminal.Signature = None,
    form: terminal.As = None,
    force: terminal.Force = False,
    as_json: terminal.Json = False,
) -> None:
    """Cut a part out of a model, between some tensors."""
    if not (inputs or outputs or ops):
        raise CommandError("say where to cut: pass --input or --to")
    starts, ends = files.named(inputs), files.named(outputs)
    if files.is_lite(path):
        lite_record = _LiteFiles(path, [output], form, force)
        file = lite_record.opened()
        chosen = None if ops is None else _places(ops)
        lite_part = _of_signature(file, signature).cut(starts, ends, ops=chosen)
        lite_record.write(lite_part, as_json=as_json)
        return
    if ops is not None:
        raise CommandError("--ops is of .tflite files; pass --input or --to")
    # The target is checked before the model is read, which can take minutes.
    record = Record(path, output, form, force).checked()
    part = record.read(signature).cut(starts, ends)
    record.write(part, "it has other inputs or outputs", as_json=as_json)


def split(
    path: terminal.LiteSource,
    output: terminal.Target,
    second: Annotated[
        Path,
        optional("Where to write the ops behind."),
    ],
    at: Annotated[
        list[str],
        optional("A tensor to split at; can be given several times."),
    ],
    signature: terminal.Signature = None,
    force: terminal.Force = False,
    as_json: terminal.Json = False,
) -> None:
    """Split a .tflite file in two at some tensors."""
    if output.absolute() == second.absolute():
        raise CommandError("--output and --second are the same file; name two")
    record = _lite_record(path, [output, second], force)
    file = record.opened()
    halves = _of_signature(file, signature).split(at)
    record.write(*halves, as_json=as_json)


def expose(
    path: terminal.LiteSource,
    output: terminal.Target,
    tensors: Annotated[
        list[str],
        optional(
            "A tensor that becomes an output, too; name=tensor also names it.", "--to"
        ),
    ],
    signature: terminal.Signature = None,
    force: terminal.Force = False,
    as_json: terminal.Json = False,
) -> None:
    """Let tensors of a .tflite file be outputs, too, to look inside a run."""
    record = _lite_record(path, [output], force)
    file = record.opened()
    file.expose(files.named(tensors), graph=_graph_of(file, signature))
    record.write(file, as_json=as_json)


def _lite_record(path: Path, outputs: list[Path], force: bool) -> _LiteFiles:
    if not files.is_lite(path):
        raise CommandError(f"'{path}' is no .tflite file, which this command is for")
    return _LiteFiles(path, outputs, None, force)


def splice(
    path: terminal.Source,
    other: Annotated[
        Path, typer.Argument(help="The model that is put in.", show_default=False)
    ],
    output: terminal.Target,
    replace: Annotated[
        list[str],
        optional("tensor=output: what of the other model takes a tensor's place."),
    ],
    feed: Annotated[
        list[str] | None,
        optional("input=tensor: what an input of the other model reads."),
    ] = None,
    signature: terminal.Signature = None,
    other_signature: Annotated[
        str | None, optional("The signature of the other model.")
    ] = None,
    form: terminal.As = None,
    force: terminal.Force = False,
    as_json: terminal.Json = False,
) -> None:
    """Put a model into another one, in the place of some of its tensors."""
    replaced, fed = _pairs(replace), _pairs(feed)
    files.check_source(other)
    record = Record(path, output, form, force).checked()
    model = record.read(signature)
    spliced = model.splice(_other(other, other_signature), replaced, fed)
    record.write(spliced, "it computes something else", as_json=as_json)


def _other(path: Path, signature: str | None) -> Model:
    """Open the model that is put in, which has an option of its own for signatures."""
    with spoken_with({**vocabulary(), "signature=": "--other-signature"}):
        return files.read_model(path, signature)


def rename(
    path: terminal.SourceOrLite,
    output: terminal.Target,
    inputs: Annotated[
        list[str] | None, optional("old=new, of an input.", "--input")
    ] = None,
    outputs: Annotated[
        list[str] | None, optional("old=new, of an output.", "--to")
    ] = None,
    results: Annotated[list[str] | None, typer.Option("--result", hidden=True)] = None,
    to_signature: Annotated[
        str | None, optional("The new name of the signature.")
    ] = None,
    tensors: Annotated[
        list[str] | None,
        optional("old=new, of a tensor in a .tflite file.", "--tensor"),
    ] = None,
    from_signature: Annotated[
        bool,
        typer.Option(
            "--from-signature",
            help="Call the ends of a .tflite file as its signatures do.",
        ),
    ] = False,
    signature: terminal.Signature = None,
    form: terminal.As = None,
    force: terminal.Force = False,
    as_json: terminal.Json = False,
) -> None:
    """Rename inputs, outputs or the signature of a model."""
    # --result is what --to was called.
    given_outputs = [*(outputs or ()), *(results or ())]
    input_renames, output_renames = _pairs(inputs) or None, _pairs(given_outputs)
    asked = input_renames or output_renames or to_signature
    if not (asked or tensors or from_signature):
        raise CommandError("say what to rename: --input, --to or --to-signature")
    if files.is_lite(path):
        lite_record = _LiteFiles(path, [output], form, force)
        file = lite_record.opened()
        key = signature or (next(iter(file.signatures), "") if to_signature else None)
        file.rename(
            input_renames,
            output_renames,
            tensors=_pairs(tensors),
            signatures={key or "": to_signature} if to_signature else None,
            from_signature=(signature or True) if from_signature else False,
            graph=_graph_of(file, signature),
        )
        lite_record.write(file, as_json=as_json)
        return
    if tensors or from_signature:
        option = "--tensor" if tensors else "--from-signature"
        raise CommandError(f"{option} is of .tflite files")
    record = Record(path, output, form, force).checked()
    model = record.read(signature)
    renamed = model.rename(input_renames, output_renames or None, to_signature)
    why_not = "its inputs have other names" if input_renames else ""
    record.write(renamed, why_not, as_json=as_json)


def batch_size(
    path: terminal.SourceOrLite,
    size: Annotated[
        str,
        typer.Argument(
            help="A number, or 'any'.", autocompletion=lambda incomplete: ["any"]
        ),
    ],
    output: terminal.Target,
    signature: terminal.Signature = None,
    form: terminal.As = None,
    force: terminal.Force = False,
    as_json: terminal.Json = False,
) -> None:
    """Change the batch size of a model, and prove the result by running it."""
    if size != "any" and not (size.isdigit() and int(size)):
        raise CommandError(f"'{size}' is no batch size; pass a number, or 'any'")
    if files.is_lite(path):
        lite_record = _LiteFiles(path, [output], form, force)
        file = lite_record.opened()
        rows = None if size == "any" else int(size)
        file.set_batch_size(rows, graph=_graph_of(file, signature))
        lite_record.write(file, as_json=as_json)
        return
    record = Record(path, output, form, force).checked()
    model = record.read(signature)
    with working("changing and proving"):
        changed = model.set_batch_size(None if size == "any" else int(size))
    why_not = "the batch size was proven, sample by sample, as it was changed"
    record.write(changed, why_not, as_json=as_json)


def strip(
    path: terminal.SourceOrLite,
    output: terminal.Target,
    keep: Annotated[
        list[str] | None,
        optional("An op, a scope or a Keras layer that stays as it is."),
    ] = None,
    names: Annotated[
        bool,
        typer.Option("--names", help="Leave out names inside a .tflite file, too."),
    ] = False,
    metadata: Annotated[
        bool,
        typer.Option("--metadata", help="Leave out metadata of a .tflite file, too."),
    ] = False,
    signature: terminal.Signature = None,
    form: terminal.As = None,
    force: terminal.Force = False,
    as_json: terminal.Json = False,
) -> None:
    """Take out of a model what serves training alone, or no run of a .tflite file."""
    if files.is_lite(path):
        _refuse(keep=keep, signature=signature)
        lite_record = _LiteFiles(path, [output], form, force)
        file = lite_record.opened()
        file.strip(names=names, metadata=metadata)
        lite_record.write(file, as_json=as_json)
        return
    if names or metadata:
        raise CommandError("--names and --metadata are of .tflite files")
    record = Record(path, output, form, force).checked()
    model = record.read(signature)
    with working("stripping"):
        stripped = model.strip_training(keep=keep or ())
    files.write_model(stripped, output, form, force)
    report = stripped.strip_report
    # Training parts were taken out on purpose: a difference would be no fault.
    trained = report is not None and (report.removed or report.turned)
    why_not = "it does not compute as in training any more" if trained else ""
    tell(record.written(stripped, why_not=why_not), report, as_json=as_json)


def unroll(
    path: terminal.Source,
    output: terminal.Target,
    loops: Annotated[
        list[str] | None, optional("A regex in the names of loops; else all.", "--loop")
    ] = None,
    max_ops: Annotated[
        int, typer.Option(min=1, help="How many ops the result may have.")
    ] = 100_000,
    signature: terminal.Signature = None,
    form: terminal.As = None,
    force: terminal.Force = False,
    as_json: terminal.Json = False,
) -> None:
    """Replace loops, such as those of LSTM and GRU layers, by a copy for each step."""
    for regex in loops or ():
        files.compiled(regex)
    record = Record(path, output, form, force).checked()
    model = record.read(signature)
    with working("unrolling"):
        unrolled = model.unroll(loops or None, max_ops=max_ops)
    record.write(unrolled, as_json=as_json)


def fold(
    path: terminal.Source,
    output: terminal.Target,
    scope: Annotated[
        str | None,
        typer.Option(help="Only batch norms of this name scope or Keras layer."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail if a batch norm is refused.")
    ] = False,
    html: terminal.Html = None,
    signature: terminal.Signature = None,
    form: terminal.As = None,
    force: terminal.Force = False,
    as_json: terminal.Json = False,
) -> None:
    """Fold the batch norms of a model into its layers."""
    record = Record(path, output, form, force).checked()
    files.check_page(html, force)
    model = record.read(signature, to_be_changed=True)
    from geutil import report
    from geutil.batchnorm import fold_batch_norms

    files.check_scope(model, scope)
    with working("folding"):
        folds = fold_batch_norms(model, scope=scope, strict=strict)
    files.write_model(model, output, form, force)
    if html is not None:
        before = files.read_model(path, signature)
        title = f"{path.absolute().name}, batch norms folded"
        files.write_page(
            html, lambda: report.diff(before, model, title=title, report=folds)
        )
    tell(record.written(model), folds, as_json=as_json)


def _pairs(values: list[str] | None) -> dict[str, str]:
    """Return pairs that are given as old=new."""
    new_by_old = {}
    for value in values or ():
        old, mark, new = value.partition("=")
        if not (old and mark and new):
            raise CommandError(f"'{value}' is no pair; write it as old=new")
        new_by_old[old] = new
    return new_by_old


_NOT_RUN = "files of .tflite are edited without a run; `geutil check` runs both"


@dataclass
class _LiteFiles:
    """A command on a TFLite file from its start: the file read, and those written."""

    path: Path
    outputs: list[Path]
    form: ModelFormat | None
    force: bool
    _began: float = field(default_factory=time.monotonic)
    _kinds: Counter[str] = field(default_factory=Counter)
    _size: int = 0

    def opened(self) -> LiteFile:
        """Check the outputs and open the file."""
        for output in self.outputs:
            if files.format_of(output, self.form) is not ModelFormat.tflite:
                raise CommandError(
                    f"a .tflite file is written as one: name '{output}' .tflite"
                )
            files.check_target(output, self.form, self.force)
        from geutil import tflite

        try:
            file = tflite.open(self.path)
        except TFLiteError as error:
            raise CommandError(f"'{self.path}' cannot be read: {error}") from error
        self._kinds = Counter(op.kind for op in file.ops)
        self._size = self.path.stat().st_size
        return file

    def write(self, *results: LiteFile, as_json: bool) -> None:
        """Write the results, and say so."""
        told = []
        for file, output in zip(results, self.outputs, strict=True):
            file.save(output, overwrite=self.force)
            kinds = Counter(op.kind for op in file.ops)
            written = Written(
                output,
                ModelFormat.tflite.value,
                output.stat().st_size,
                self._size,
                dict(kinds - self._kinds),
                dict(self._kinds - kinds),
                None,
                0,
                False,
                _NOT_RUN,
                time.monotonic() - self._began,
            )
            told.append(
                {"path": output, **_lite_described(file), "written": plain(written)}
            )
            if not as_json:
                print(f"{file!r} -> {output}")
                print(written)
        if as_json:
            show(told[0] if len(told) == 1 else told, as_json=True)


def _graph_of(file: LiteFile, signature: str | None) -> LiteGraph | None:
    """Return the subgraph of a signature; None, for the main one, if none is named."""
    if signature is None:
        return None
    if signature not in file.signatures:
        raise CommandError(
            f"there is no signature '{signature}'; it has {[*file.signatures]}"
        )
    return file.signatures[signature].graph


def _of_signature(file: LiteFile, signature: str | None) -> LiteFile:
    """Return a file with one signature, whose names parts then have; all if None."""
    if _graph_of(file, signature) is None or signature is None:
        return file
    return file.keep_signatures(signature)


def _places(text: str) -> range:
    """Return the places of ops that are written as START:END."""
    start, mark, end = text.partition(":")
    if not (mark and start.isdigit() and end.isdigit()):
        raise CommandError(f"'{text}' is no range of ops; write it as START:END")
    return range(int(start), int(end))


def _refuse(**options: Any) -> None:
    """Refuse options that models have and TFLite files have not."""
    given = [name.replace("_", "-") for name, value in options.items() if value]
    if given:
        raise CommandError(f"--{given[0]} is of models, and not of a .tflite file")


def _lite_described(file: LiteFile) -> dict[str, Any]:
    return {
        "signatures": {
            key: {
                "inputs": {name: _end(t) for name, t in signature.inputs.items()},
                "outputs": {name: _end(t) for name, t in signature.outputs.items()},
            }
            for key, signature in file.signatures.items()
        },
        "inputs": {t.name: _end(t) for t in file.graphs[0].inputs},
        "outputs": {t.name: _end(t) for t in file.graphs[0].outputs},
        "ops": len([*file.ops]),
    }


def _end(tensor: LiteTensor) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "shape": tensor.shape}
