"""Commands that write a model in another format, run it on data, or do so with many."""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from geutil.cli import files, terminal
from geutil.cli.files import Batches, CommandError, Record, Written
from geutil.cli.terminal import (
    ModelFormat,
    optional,
    plain,
    show,
    show_rows,
    show_written,
    working,
)
from geutil.errors import ModelError, QuantizeError
from geutil.formats import format_by_name
from geutil.progress import counted

if TYPE_CHECKING:
    import numpy as np

    from geutil.data_files import Wanted
    from geutil.model import Model
    from geutil.model.comparison import Comparison
    from geutil.select.networks.outputs import Difference, Motion

_KERAS = ".keras"
_KERAS_READ = (_KERAS, ".h5", ".hdf5")


def convert(
    path: terminal.Source,
    output: terminal.Target,
    tf_ops: Annotated[
        bool,
        typer.Option(
            "--tf-ops",
            help="Of a .tflite file: keep ops that TensorFlow Lite lacks as "
            "TensorFlow's own, for interpreters that come with them.",
        ),
    ] = False,
    signature: terminal.Signature = None,
    form: terminal.As = None,
    force: terminal.Force = False,
    as_json: terminal.Json = False,
) -> None:
    """Write a model in another format, and run what was written beside it.

    A .keras file is written of a .keras or .h5 file alone, without what it was compiled
    with: it holds layers, which no graph tells.
    """
    files.check_source(path)
    to_keras = output.suffix.lower() == _KERAS
    # A .keras file holds layers, which a graph does not tell: it has its own check.
    if to_keras:
        _check_keras(path, output, form)
        files.check_place(output, force)
    else:
        files.check_target(output, form, force)
    form_written = None if to_keras else files.format_of(output, form)
    if tf_ops:
        files.check_is_lite("--tf-ops", form_written is ModelFormat.tflite)
    record = Record(path, output, form, force)
    model = record.read(signature)
    if to_keras:
        _write_keras(path, output)
    else:
        files.write_model(model, output, form, force, tf_ops=tf_ops)
    written = _written(record, model, form_written)
    show_written(model, written, as_json=as_json)


def _check_keras(path: Path, output: Path, form: ModelFormat | None) -> None:
    """Refuse a .keras file of a model without layers."""
    if form is not None:
        raise CommandError(
            f"'{output}' is called a .keras file, and --format is {form.value}; leave "
            "that out, or choose another name"
        )
    if output.is_dir():
        raise CommandError(f"'{output}' is a directory, and is not replaced by a file")
    if path.suffix.lower() not in _KERAS_READ:
        raise CommandError(
            f"'{output}' is called a .keras file, which holds layers, and '{path}' "
            "holds a graph, which does not tell them; name a SavedModel directory, or "
            "a .pb, .pbtxt or .tflite file"
        )


def _write_keras(path: Path, output: Path) -> None:
    """Write a file of Keras as a .keras file, by Keras itself."""
    from geutil.formats import written_atomically
    from geutil.model.sources.objects import load_keras_file

    with (
        working(f"writing {output.name}"),
        written_atomically(output, overwrite=True) as new,
    ):
        load_keras_file(path).save(new)


def _written(record: Record, model: Model, form: ModelFormat | None) -> Written:
    """Return the report of the written file, which is read again and run."""
    path, suffix = record.output, record.output.suffix.lower()
    # A file is opened by its suffix, which names another format here.
    if form is not None and form.value != format_by_name(path):
        return record.written(model, why_not=f"'{suffix}' does not say what it is")
    if form is ModelFormat.tflite:
        return record.written(
            model, compared=lambda: _drawn_comparison(model, _read_runnable(path, None))
        )
    # Other formats hold one signature, and not by its name.
    keeps_name = form is ModelFormat.saved_model
    format = "" if form else _KERAS.removeprefix(".")
    try:
        again = files.read_model(path, model.signature if keeps_name else None)
    except ModelError as error:
        why_not = f"it is not opened: {error}"
        return record.written(model, why_not=why_not, format=format)
    return record.written(again, format=format)


# The tolerances of `Model.compare`.
_RTOL, _ATOL = 1e-5, 1e-6


def run(
    path: terminal.SourceOrLite,
    data: terminal.Data,
    output: Annotated[
        Path | None, optional("A .npz file to write the outputs to.", "--output", "-o")
    ] = None,
    against: Annotated[
        Path | None,
        optional("A model or .tflite file to run on the same data, and compare with."),
    ] = None,
    rtol: Annotated[
        float | None,
        typer.Option(min=0, help="The relative tolerance.", show_default=str(_RTOL)),
    ] = None,
    atol: Annotated[
        float | None,
        typer.Option(min=0, help="The absolute tolerance.", show_default=str(_ATOL)),
    ] = None,
    batch: terminal.BatchSize = 32,
    signature: terminal.Signature = None,
    force: terminal.Force = False,
    as_json: terminal.Json = False,
) -> int:
    """Run a model on data, and show what each output holds.

    With --against, exit with 1 if an output is farther from that of the other model
    than the tolerances. A .tflite file is run by its interpreter: inputs are given, and
    outputs shown, as the model has them, and not in the steps of the file.
    """
    if against is None and (rtol, atol) != (None, None):
        raise CommandError("--rtol and --atol are for --against; leave them out")
    for source in (path, against):
        if source is not None:
            files.check_source(source)
    files.check_file(output, force, "arrays", ".npz")
    # Names of arrays are checked before TensorFlow starts, which takes seconds.
    files.Batches(data, batch).of_file(path, signature)
    files.start_tensorflow()
    ours = _outputs_on(_read_runnable(path, signature), data, batch)
    limits = _RTOL if rtol is None else rtol, _ATOL if atol is None else atol
    found, moves = [], _motions(ours)
    if against is not None:
        other = _read_runnable(against, signature)
        theirs = _outputs_on(other, data, batch, tell=False)
        found = _differences(ours, theirs, *limits)
    if output is not None:
        _write_arrays(ours, output)
    described = [
        {**_described(name, value), "nan": held.nan, "infinite": held.infinite}
        for (name, value), held in zip(ours.items(), moves.values(), strict=True)
    ]
    equal = all(each.equal for _, each in found)
    if as_json:
        told: dict[str, Any] = {"outputs": described}
        if against is not None:
            apart = [
                {**_apart(each), "motion": plain(moves[name])} for name, each in found
            ]
            told |= {"differences": apart, "equal": equal}
        show(told, as_json=True)
    else:
        show_rows(list(_COLUMNS), map(_row, described), as_json=False)
        broken = [
            f"output '{name}' holds {held.not_finite} of {ours[name].size} values"
            for name, held in moves.items()
            if held.not_finite
        ]
        if broken:
            print(f"not finite: {'; '.join(broken)}")
        for name, each in found:
            motion = moves[name].told(*limits, equal=each.equal)
            told_apart = str(each).replace(_ONE_SAMPLE, "")
            print(f"{told_apart}{'; ' if motion else ''}{motion}")
    return 0 if equal else 1


def batch(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Directories, of which all models are taken, or models.",
            metavar="PATH...",
        ),
    ],
    output: Annotated[
        Path,
        optional("The directory of the results.", "--output", "-o"),
    ],
    pipeline: Annotated[
        str,
        optional(
            "Steps with commas between them: fold, strip, freeze, unroll, "
            "batch-size=N, quantize, save=FORMAT, tflite; options behind colons, as in "
            "quantize:scheme=int8x4."
        ),
    ],
    data: Annotated[
        str | None,
        optional(
            "Data to calibrate with: a .npz file, a directory of them, one with "
            "NAME.npz for each model, or 'random'."
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="How many models at once; else as many as there are cores."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="How many seconds a model may take.")
    ] = 3600.0,
    again: Annotated[
        bool, typer.Option("--again", help="Do again what is done, too.")
    ] = False,
    pages: Annotated[
        bool,
        typer.Option("--pages", help="Write a page for each model, with its stages."),
    ] = False,
    signature: terminal.Signature = None,
    as_json: terminal.Json = False,
) -> int:
    """Take many models through a pipeline, each in a process of its own.

    Called again, it does what is not done. Exit with 1 if a model is not done.
    """
    from geutil.model import batch as run_batch

    report = run_batch(
        paths if len(paths) > 1 else paths[0],
        pipeline,
        output,
        data=data,
        signature=signature,
        workers=workers,
        timeout=timeout,
        resume=not again,
        pages=pages,
    )
    if as_json:
        show(report.to_dict(), as_json=True)
    else:
        print(report)
    return 1 if report.undone else 0


_ONE_SAMPLE = " of sample 0"
"""All samples are one array here, whose index says which."""


def _motions(outputs: dict[str, Any]) -> dict[str, Motion]:
    """Return how much each output moves with the samples, which are its rows."""
    from geutil.select.networks.outputs import Movement

    motions = {}
    for name, values in outputs.items():
        movement = Movement()
        movement.add(values, len(values) if values.ndim else None)
        motions[name] = movement.entry()
    return motions


def _apart(difference: Difference) -> dict[str, Any]:
    told: dict[str, Any] = plain(difference)
    del told["sample"]
    return told


_COLUMNS = ("name", "dtype", "shape", "min", "max", "mean")


def _described(name: str, value: Any) -> dict[str, Any]:
    """Return dtype, shape and numbers of an output; None for numbers that it lacks."""
    import numpy as np

    numbers: dict[str, float | None] = dict.fromkeys(_COLUMNS[3:])
    if value.size and value.dtype.kind in "biuf":
        wide = value.astype(np.float64)
        numbers = {key: float(getattr(wide, key)()) for key in numbers}
    dtype = "string" if value.dtype == object else str(value.dtype)
    return {"name": name, "dtype": dtype, "shape": list(value.shape), **numbers}


def _row(described: dict[str, Any]) -> list[str]:
    shape = ",".join(map(str, described["shape"]))
    numbers = [described[key] for key in _COLUMNS[3:]]
    shown = ["-" if number is None else f"{number:.6g}" for number in numbers]
    return [described["name"], described["dtype"], f"[{shape}]", *shown]


def _write_arrays(arrays: dict[str, Any], path: Path) -> None:
    """Write arrays of whatever names, as numpy.load reads them."""
    import numpy as np

    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name, value in arrays.items():
            # Objects would be pickled, which numpy.load does not read by itself.
            array = value.astype(np.bytes_) if value.dtype == object else value
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array)
    files.write_bytes(written.getvalue(), path)
    print(f"geutil: wrote {path}", file=sys.stderr)


_Arrays = dict[str, Any]


@dataclass(frozen=True)
class _Runnable:
    """A computation of outputs by name from inputs by name.

    Attributes:
        path: where it was read.
        inputs: the names of the inputs, their types and shapes.
        outputs: the names of the outputs.
        call: computes outputs, of inputs for which `_fed` has found the arrays.
    """

    path: Path
    inputs: Mapping[str, Wanted]
    outputs: tuple[str, ...]
    call: Callable[[_Arrays], _Arrays]

    @property
    def batch(self) -> int | None:
        """The one batch size that it takes; None if it takes any."""
        sizes = {want.shape[0] for want in self.inputs.values() if want.shape}
        return sizes.pop() if len(sizes) == 1 else None


def _read_runnable(path: Path, signature: str | None) -> _Runnable:
    """Open a model or TFLite file that is to be run."""
    if files.is_lite(path):
        return _file(path, signature)
    import tensorflow as tf

    from geutil.data_files import wanted

    model = files.read_model(path, signature)

    def call(arrays: _Arrays) -> _Arrays:
        try:
            return model.run(**arrays)
        except tf.errors.OpError as error:
            # Below its first line, TensorFlow's message lists ops of the graph.
            said = str(error.message).strip().partition("\n")[0]
            raise CommandError(
                f"'{path}' fails on these data: {said}; pass data that it can take"
            ) from error

    inputs = {name: wanted(t) for name, t in model.inputs.items()}
    return _Runnable(path, inputs, tuple(model.outputs), call)


def _file(path: Path, signature: str | None) -> _Runnable:
    """Open a TFLite file, whose integers are steps of its own."""
    from geutil.data_files import wanted
    from geutil.model import inspect
    from geutil.quantize.tflite.runner import Runner

    inspection = inspect(str(path))
    signatures = inspection.signatures
    if len(signatures) != 1:
        raise CommandError(
            f"'{path}' has {len(signatures)} signatures, and a file is run by its "
            "only one; convert the model again, with one signature"
        )
    ((name, ends),) = signatures.items()
    if signature not in (None, name):
        raise CommandError(
            f"'{path}' has no signature '{signature}'; it has ['{name}']"
        )
    try:
        runner = Runner(path.read_bytes(), list(ends.inputs), list(ends.outputs))
    except QuantizeError as error:
        flex_ops = list(getattr(inspection, "flex_ops", ()))
        if not flex_ops:
            raise
        raise CommandError(
            f"'{path}' has ops of TensorFlow ({', '.join(flex_ops)}), which the "
            "interpreter that is installed does not come with; run the model that it "
            "was made from"
        ) from error

    def call(arrays: _Arrays) -> _Arrays:
        for key, array in arrays.items():
            _check_fits(path, key, array, ends.inputs[key])
        return runner.results(runner.run(runner.stored(arrays)))

    inputs = {key: wanted(info) for key, info in ends.inputs.items()}
    return _Runnable(path, inputs, tuple(ends.outputs), call)


def _check_fits(path: Path, key: str, array: Any, info: Any) -> None:
    """Refuse arrays that TFLite would accept and misread."""
    import numpy as np

    shape = info.shape
    fits = shape is None or (
        len(shape) == array.ndim
        and all(a in (None, b) for a, b in zip(shape, array.shape, strict=True))
    )
    # Of text and of steps anything is made that can be.
    is_number = info.dtype != "string" and info.quantization is None
    if not fits or (
        is_number and not np.can_cast(array.dtype, np.dtype(info.dtype), "same_kind")
    ):
        raise CommandError(
            f"input '{key}' of '{path}' is {info.dtype} of shape {_shown(shape)}, and "
            f"got {array.dtype} of shape {_shown(array.shape)}; convert it first"
        )


def _shown(shape: Sequence[int | None] | None) -> str:
    if shape is None:
        return "unknown"
    return f"[{','.join('n' if size is None else str(size) for size in shape)}]"


def _outputs_on(
    side: _Runnable, data: Path, batch: int, *, tell: bool = True
) -> _Arrays:
    """Return the outputs of all samples, batch by batch."""
    batches = Batches(data, batch).fitted(side.inputs, tell=tell)
    parts: dict[str, list[Any]] = {name: [] for name in side.outputs}
    counts = []
    for arrays in counted(batches, len(batches), None, f"running {side.path.name}"):
        counts.append(_samples(side, arrays))
        for name, value in side.call(arrays).items():
            parts[name].append(value)
    if not counts:
        raise CommandError(f"'{data}' has no sample; give one at least")
    return {name: _joined(name, values, counts) for name, values in parts.items()}


def _fed(side: _Runnable, arrays: Mapping[str, Any]) -> _Arrays:
    """Return the array of each input, by its name in the model or in a file."""
    from geutil.tflite.op_names import file_names

    # Data saved for a TFLite file name inputs as the converter does.
    of_file = file_names(list(arrays))
    by_name = {of_file[name]: name for name in arrays}
    found = {
        name: name if name in arrays else by_name.get(name) for name in side.inputs
    }
    missing = [name for name, key in found.items() if key is None]
    unused = sorted(set(arrays) - set(found.values()))
    if missing or unused:
        wrong = (
            f"no array for input '{missing[0]}'"
            if missing
            else f"an array '{unused[0]}' for no input"
        )
        raise CommandError(
            f"the data have {wrong} of '{side.path}': the arrays are {list(arrays)}, "
            f"the inputs {list(side.inputs)}; name each array as its input"
        )
    return {name: arrays[str(key)] for name, key in found.items()}


def _samples(side: _Runnable, inputs: _Arrays) -> int:
    counts = {len(array) if array.ndim else 1 for array in inputs.values()}
    count = max(counts, default=1)
    if side.batch is not None and count != side.batch:
        raise CommandError(
            f"'{side.path}' takes {side.batch} samples at once, and {count} are left "
            f"for the last batch; give a multiple of {side.batch} samples, or change "
            "the model with `geutil batch-size`"
        )
    return count


def _joined(name: str, parts: Sequence[np.ndarray[Any, Any]], counts: list[int]) -> Any:
    import numpy as np

    if len(parts) == 1:
        return np.asarray(parts[0])
    for part, count in zip(parts, counts, strict=True):
        if not part.ndim or len(part) != count:
            raise CommandError(
                f"output '{name}' has the shape {_shown(part.shape)} for {count} "
                "samples, so that batches of it cannot be joined; run all at once, "
                f"with --batch {sum(counts)}"
            )
    return np.concatenate(parts)


def _drawn_comparison(model: Any, side: _Runnable, samples: int = 2) -> Comparison:
    """Compare a model with a file that was made from it, on drawn inputs."""
    import numpy as np

    from geutil.model.comparison import Comparison, bounds_of_indices, random_inputs
    from geutil.select.networks.outputs import Tally, rows_of

    rng, bounds = np.random.default_rng(0), bounds_of_indices(model.inputs)
    tally = Tally()
    for sample in range(samples):
        arrays = random_inputs(model.inputs, rng, None, bounds)
        theirs, ours = side.call(_fed(side, arrays)), model.run(**arrays)
        for name, other in _pairs(list(ours), list(theirs)):
            tally.add(name, theirs[other], ours[name], sample, rows_of(arrays))
    return Comparison(tally.differences, samples, 0.0, 0.0, tally.motions)


def _differences(
    ours: _Arrays, theirs: _Arrays, rtol: float, atol: float
) -> list[tuple[str, Difference]]:
    """Return how far outputs are apart, those of `theirs` being the reference.

    Outputs are paired by name, or in order where no name is shared.

    Returns:
        Pairs of the name of an output of `ours` and its difference.

    Raises:
        CommandError: they cannot be paired.
    """
    from geutil.select.networks.outputs import difference

    found = []
    for a, b in _pairs(list(ours), list(theirs)):
        label = a if a == b else f"{a} and {b}"
        apart = difference(label, ours[a], theirs[b], sample=0, rtol=rtol, atol=atol)
        found.append((a, apart))
    return found


def _pairs(ours: list[str], theirs: list[str]) -> Iterator[tuple[str, str]]:
    """Pair outputs by their names in model or file; else one by one in order."""
    from geutil.tflite.op_names import file_names

    named_as_file = file_names(ours)
    named_as_model = {file: name for name, file in file_names(theirs).items()}
    pairs = []
    for name in ours:
        near = (name, named_as_file[name], named_as_model.get(name))
        pairs.append((name, next((n for n in near if n in theirs), None)))
    found = {other for _, other in pairs if other is not None}
    # No name fits: one of the models was renamed as a whole.
    if len(ours) == len(theirs) and not found:
        return zip(ours, theirs, strict=True)
    if found != set(theirs) or len(ours) != len(theirs):
        raise CommandError(
            f"the outputs do not match: {ours} and {theirs}; `geutil rename --to` or "
            "`geutil cut --to` one of the models"
        )
    return iter([(name, str(other)) for name, other in pairs])
