"""Written files, as a command tells of them: path, sizes, ops, difference, seconds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geutil.cli import files
from geutil.cli.options import ModelFormat
from geutil.cli.output import plain, show, show_written, working
from geutil.errors import GeutilError
from geutil.sizes import size_of, size_text

if TYPE_CHECKING:
    from geutil.model import Model
    from geutil.model.comparison import Comparison
    from geutil.select.networks.outputs import Motion

_SAMPLES = 2
"""Samples that are drawn: the fewest by which an output is seen to move (`Motion`)."""
_BATCH_SAMPLES = 8
"""Rows of given data: as many as `Model.compare` draws samples by default."""


@dataclass(frozen=True)
class Written:
    """The report of a written model or file.

    Attributes:
        path: the place.
        format: its format.
        bytes: its size.
        bytes_before: the size of the model that was read.
        ops_added: how many ops of each type there are more, in the graph that was
            worked on.
        ops_removed: how many there are less.
        difference: the largest difference of outputs from those of what was read; None
            if it was not run.
        samples: on how many inputs.
        given: whether these were given; else they were drawn.
        not_compared: why it was not run; "" if it was.
        seconds: from the start of the command.
        relative: the difference relative to the largest magnitude of its output.
        motions: how much each output moves with the samples.
    """

    path: Path
    format: str
    bytes: int
    bytes_before: int
    ops_added: dict[str, int]
    ops_removed: dict[str, int]
    difference: float | None
    samples: int
    given: bool
    not_compared: str
    seconds: float
    relative: float | None = None
    motions: Mapping[str, Motion] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the lines that a command prints about the file that it wrote."""
        added, removed = (sum(c.values()) for c in (self.ops_added, self.ops_removed))
        sizes = f"{size_text(self.bytes)}, before {size_text(self.bytes_before)}"
        lines = [f"wrote '{self.path}' ({self.format}): {sizes}; {self.seconds:.1f} s"]
        # A TFLite file has kinds of its own, so that such counts tell nothing.
        if self.format != ModelFormat.tflite.value:
            lines.append(f"ops: {added} added, {removed} removed")
        if self.difference is None:
            lines.append(f"not run beside what was read: {self.not_compared}")
        else:
            shown = f"{self.difference:.3g}"
            if self.relative:
                shown += f" ({self.relative:.2g} of the output)"
            lines.append(
                f"largest difference from what was read: {shown}, on "
                f"{self.samples} {'given' if self.given else 'drawn'} input(s)"
            )
            lines += [
                f"  output '{name}' {motion}"
                for name, motion in self.motions.items()
                if str(motion)
            ]
        return "\n".join(lines)


@dataclass
class Record:
    """A command from its start: the model that it reads, and the one that it writes.

    Args:
        path: the model that is read.
        output: where the result goes.
        form: the format that was asked for.
        force: whether the file at the output is replaced.
    """

    path: Path
    output: Path
    form: ModelFormat | None
    force: bool
    _began: float = field(default_factory=time.monotonic)
    _kinds: Counter[str] = field(default_factory=Counter)
    _before: Any = None
    _bytes_before: int = 0

    def checked(self) -> Record:
        """Refuse a path or an output before there is any work done."""
        files.check_source(self.path)
        files.check_target(self.output, self.form, self.force)
        return self

    def read(self, signature: str | None, *, to_be_changed: bool = False) -> Model:
        """Read the model; a copy of one that is edited in place is kept."""
        model = files.read_model(self.path, signature)
        self._bytes_before, self._kinds = size_of(self.path), _kinds(model)
        self._before = model.cut() if to_be_changed else model
        return model

    def write(self, model: Model, why_not: str = "", *, as_json: bool) -> None:
        """Write the model, and show it; see `written`."""
        files.write_model(model, self.output, self.form, self.force)
        show_written(model, self.written(model, why_not=why_not), as_json=as_json)

    def written(
        self,
        model: Model,
        data: files.Batches | None = None,
        why_not: str = "",
        *,
        compared: Callable[[], Comparison] | None = None,
        format: str = "",
    ) -> Written:
        """Return the report of a written model."""
        kinds = _kinds(model)
        found: Comparison | None = None
        if not why_not:
            try:
                with working("running both"):
                    found = (
                        self._compared(model, data) if compared is None else compared()
                    )
            # The file is written already: a run that fails is told, and no more.
            except GeutilError as error:
                why_not = str(error)
        return Written(
            self.output,
            format or files.format_of(self.output, self.form).value,
            size_of(self.output),
            self._bytes_before,
            dict(kinds - self._kinds),
            dict(self._kinds - kinds),
            None if found is None else found.largest,
            0 if found is None else found.samples,
            data is not None,
            why_not,
            time.monotonic() - self._began,
            None if found is None else found.relative,
            {} if found is None else found.motions,
        )

    def _compared(self, model: Model, data: files.Batches | None) -> Comparison:
        inputs = None
        if data is not None:
            inputs = [{n: v[:_BATCH_SAMPLES] for n, v in next(iter(data)).items()}]
        found: Comparison = self._before.compare(model, inputs, _SAMPLES)
        return found


def tell(written: Written, report: Any, *, as_json: bool) -> None:
    """Print the report of a command, and of the file that it wrote."""
    if not as_json:
        print(report)
        print(written)
        return
    show({**plain(report), "written": plain(written)}, as_json=True)


def _kinds(model: Model) -> Counter[str]:
    """Count the ops that outputs depend on by their types."""
    from geutil.select import get_backward_walk_ops

    outputs = list(model.outputs.values())
    return Counter(op.type for op in get_backward_walk_ops(outputs, inclusive=True))
