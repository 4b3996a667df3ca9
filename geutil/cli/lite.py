"""Commands that edit TFLite files: the file is read, edited and written.

TensorFlow is not started: ops, weights and names are those of the file.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geutil.cli import files
from geutil.cli.files import CommandError
from geutil.cli.options import ModelFormat
from geutil.cli.output import plain, show
from geutil.cli.written import Written
from geutil.errors import TFLiteError

if TYPE_CHECKING:
    from geutil.tflite import LiteFile, LiteGraph, LiteTensor

_NOT_RUN = "files of .tflite are edited without a run; `geutil check` runs both"


@dataclass
class LiteRecord:
    """A command on a TFLite file from its start.

    Args:
        path: the file that is read.
        outputs: where the results go.
        form: the format that was asked for.
        force: whether existing files are replaced.
    """

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
            told.append({"path": output, **_described(file), "written": plain(written)})
            if not as_json:
                print(f"{file!r} -> {output}")
                print(written)
        if as_json:
            show(told[0] if len(told) == 1 else told, as_json=True)


def graph_of(file: LiteFile, signature: str | None) -> LiteGraph | None:
    """Return the subgraph of a signature; None, for the main one, if none is named."""
    if signature is None:
        return None
    if signature not in file.signatures:
        raise CommandError(
            f"there is no signature '{signature}'; it has {[*file.signatures]}"
        )
    return file.signatures[signature].graph


def places(text: str) -> range:
    """Return the places of ops that are written as START:END."""
    start, mark, end = text.partition(":")
    if not (mark and start.isdigit() and end.isdigit()):
        raise CommandError(f"'{text}' is no range of ops; write it as START:END")
    return range(int(start), int(end))


def refuse(**options: Any) -> None:
    """Refuse options that models have and TFLite files have not."""
    given = [name.replace("_", "-") for name, value in options.items() if value]
    if given:
        raise CommandError(f"--{given[0]} is of models, and not of a .tflite file")


def _described(file: LiteFile) -> dict[str, Any]:
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
