"""Models and TFLite files that are run on data; files as if they had no steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geutil.cli import files
from geutil.cli.files import Batches, CommandError
from geutil.errors import QuantizeError
from geutil.progress import counted

if TYPE_CHECKING:
    import numpy as np

    from geutil.data_files import Wanted
    from geutil.model.comparison import Comparison
    from geutil.select.networks.outputs import Difference

Arrays = dict[str, Any]


@dataclass(frozen=True)
class Runnable:
    """A computation of outputs by name from inputs by name.

    Attributes:
        path: where it was read.
        inputs: the names of the inputs, their types and shapes.
        outputs: the names of the outputs.
        call: computes outputs, of inputs for which `fed` has found the arrays.
    """

    path: Path
    inputs: Mapping[str, Wanted]
    outputs: tuple[str, ...]
    call: Callable[[Arrays], Arrays]

    @property
    def batch(self) -> int | None:
        """The one batch size that it takes; None if it takes any."""
        sizes = {want.shape[0] for want in self.inputs.values() if want.shape}
        return sizes.pop() if len(sizes) == 1 else None


def read_runnable(path: Path, signature: str | None) -> Runnable:
    """Open a model or TFLite file that is to be run."""
    if files.is_lite(path):
        return _file(path, signature)
    import tensorflow as tf

    from geutil.data_files import wanted

    model = files.read_model(path, signature)

    def call(arrays: Arrays) -> Arrays:
        try:
            return model.run(**arrays)
        except tf.errors.OpError as error:
            # Below its first line, TensorFlow's message lists ops of the graph.
            said = str(error.message).strip().partition("\n")[0]
            raise CommandError(
                f"'{path}' fails on these data: {said}; pass data that it can take"
            ) from error

    inputs = {name: wanted(t) for name, t in model.inputs.items()}
    return Runnable(path, inputs, tuple(model.outputs), call)


def _file(path: Path, signature: str | None) -> Runnable:
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

    def call(arrays: Arrays) -> Arrays:
        for key, array in arrays.items():
            _check_fits(path, key, array, ends.inputs[key])
        return runner.results(runner.run(runner.stored(arrays)))

    inputs = {key: wanted(info) for key, info in ends.inputs.items()}
    return Runnable(path, inputs, tuple(ends.outputs), call)


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


def outputs_on(side: Runnable, data: Path, batch: int, *, tell: bool = True) -> Arrays:
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


def fed(side: Runnable, arrays: Mapping[str, Any]) -> Arrays:
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


def _samples(side: Runnable, inputs: Arrays) -> int:
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


def drawn_comparison(model: Any, side: Runnable, samples: int = 2) -> Comparison:
    """Compare a model with a file that was made from it, on drawn inputs."""
    import numpy as np

    from geutil.model.comparison import Comparison, bounds_of_indices, random_inputs
    from geutil.select.networks.outputs import Tally, rows_of

    rng, bounds = np.random.default_rng(0), bounds_of_indices(model.inputs)
    tally = Tally()
    for sample in range(samples):
        arrays = random_inputs(model.inputs, rng, None, bounds)
        theirs, ours = side.call(fed(side, arrays)), model.run(**arrays)
        for name, other in _pairs(list(ours), list(theirs)):
            tally.add(name, theirs[other], ours[name], sample, rows_of(arrays))
    return Comparison(tally.differences, samples, 0.0, 0.0, tally.motions)


def differences(
    ours: Arrays, theirs: Arrays, rtol: float, atol: float
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
