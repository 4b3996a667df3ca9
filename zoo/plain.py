"""`python -m zoo.plain NAME FOLDER JOURNEY ...`: the side of plain TensorFlow.

This process never imports geutil. It makes the model, its samples and what TensorFlow
itself makes of both, and says so; then it waits. At the next line of its input it loads
what geutil has written since, runs and differentiates it, and ends.
"""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from zoo.models import MODELS, Entry
from zoo.subject import (
    BATCHES,
    FEWER,
    MANY,
    Function,
    GraphOfVersion1,
    Sample,
    draw,
    draw_all,
    first_rows,
    flow_of,
    has_batch,
    of_keras,
)
from zoo.values import (
    Array,
    Values,
    apart,
    arrays,
    keep,
    kept,
    loss_of,
    slopes_apart,
    without_grappler,
)

SEED = 0
EXTRAS = {
    "open": ("slopes", "keras", "frozen"),
    "fold": ("slopes",),
    "int8": ("ptq", "exact"),
    "memory": ("gradients",),
    "speed": ("gradients",),
    "peak": ("gradients",),
    "fit": ("fitted",),
    "bits": ("repeated",),
}
"""What journeys need besides the SavedModel and its outputs."""
_RATE = 0.01


def built(entry: Entry, seed: int = SEED) -> Any:
    """Build a model, with the same weights and seeds each time."""
    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(seed)
    return entry.build()


def make(entry: Entry, folder: Path, journeys: Sequence[str]) -> None:
    """Write all that the journeys need into a folder; `made.pickle` comes last."""
    subject = built(entry)
    sample = draw(subject, 0)
    calibration = [draw(subject, 1 + i) for i in range(BATCHES)]
    keep(folder / "calibration.pickle", calibration)
    path = folder / "saved_model"
    subject.write(path)
    loaded = tf.saved_model.load(str(path)).signatures
    run = loaded["serving_default"]
    many = draw(subject, 0, MANY) if has_batch(subject) else sample
    made: dict[str, Any] = {
        "sample": sample,
        "many": many,
        "others": _others(loaded),
        "calibration": calibration,
        "outputs": _run(run, sample),
        "has_batch": has_batch(subject),
        "norms": subject.norms,
    }
    if made["has_batch"]:
        made["fewer"] = _run(run, first_rows(sample, subject, FEWER))
    extras: dict[str, Callable[[], Any]] = {
        "slopes": lambda: _slopes(path, sample),
        "keras": lambda: _keras_file(subject, folder / "model.keras", sample),
        "frozen": lambda: _frozen(subject, folder / "frozen.pb", sample),
        "exact": lambda: [_run(run, x) for x in calibration],
        "ptq": lambda: _ptq(folder),
        "gradients": lambda: gradients_of(built(entry), many),
        "fitted": lambda: fitted(built(entry), many),
        "repeated": lambda: repeated(entry, many, tf.gradients),
    }
    needed = {extra for journey in journeys for extra in EXTRAS.get(journey, ())}
    for name, extra in extras.items():
        if name in needed:
            made[name] = _tried(extra)
    keep(folder / "made.pickle", made)


def _tried(work: Callable[[], Any]) -> Any:
    """Return what a work gives; where TensorFlow itself fails, the error's text."""
    try:
        return work()
    except Exception as error:  # Of whatever class: TensorFlow fails, not geutil.
        first = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {first[0]}"


def _run(run: Any, sample: Sample) -> dict[str, Array]:
    return arrays(run(**{name: tf.constant(value) for name, value in sample.items()}))


def _others(loaded: Any) -> dict[str, tuple[Sample, dict[str, Array]]]:
    """Return what the other signatures make of which inputs, by their names."""
    found = {}
    for name in loaded:
        if name != "serving_default":
            sample = draw_all(loaded[name].structured_input_signature[1], 0)
            found[name] = sample, _run(loaded[name], sample)
    return found


def _keras_file(subject: Any, path: Path, sample: Sample) -> Values | None:
    """Write a `.keras` file; return what Keras computes that reads it again."""
    network = getattr(subject, "network", None)
    if network is None or not isinstance(network, tf.keras.Model):
        return None
    network.save(path)
    # Some of keras_hub's own networks do not come back, or not with the same bits.
    loaded = of_keras(tf.keras.models.load_model(path, compile=False), perturbed=False)
    return _run(
        loaded.concrete(), dict(zip(loaded.inputs, sample.values(), strict=True))
    )


def _frozen(subject: Any, path: Path, sample: Sample) -> Any:
    """Write the model frozen.

    Returns:
        The tensors of its inputs and outputs by name, and what plain TensorFlow makes
        of the sample: where constants take the place of variables, kernels may round
        otherwise. None if it cannot be frozen.
    """
    if isinstance(subject, GraphOfVersion1):
        if not subject.frozen:
            return None
        graph_def = subject.freeze()
        path.write_bytes(graph_def.SerializeToString())
        outputs = {name: t.name for name, t in subject.outputs.items()}
        inputs = {name: f"{name}:0" for name in subject.inputs}
        return inputs, outputs, _run_frozen(graph_def, inputs, outputs, sample)
    from tensorflow.python.framework import convert_to_constants

    function = subject.concrete()
    frozen = convert_to_constants.convert_variables_to_constants_v2(function, False)
    if len(frozen.inputs) != len(subject.inputs):
        return None  # A table: it is no variable, and cannot be frozen.
    graph_def = frozen.graph.as_graph_def()
    path.write_bytes(graph_def.SerializeToString())
    # A dictionary of outputs is flattened in the order of its keys.
    names = sorted(function.structured_outputs)
    outputs = {n: t.name for n, t in zip(names, frozen.outputs, strict=True)}
    inputs = {t.op.name: t.name for t in frozen.inputs}
    return inputs, outputs, _run_frozen(graph_def, inputs, outputs, sample)


def _run_frozen(
    graph_def: Any,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    sample: Sample,
) -> Values:
    """Run a graph on a sample, by name or, where the names are others, in order."""
    v1 = tf.compat.v1
    whole = v1.wrap_function(lambda: v1.import_graph_def(graph_def, name=""), [])
    tensors = [
        [whole.graph.get_tensor_by_name(name) for name in ends.values()]
        for ends in (inputs, outputs)
    ]
    names = inputs if set(inputs) == set(sample) else sample
    results = whole.prune(*tensors)(*(tf.constant(sample[name]) for name in names))
    return dict(zip(outputs, map(np.asarray, results), strict=True))


def _slopes(path: Path, sample: Sample) -> dict[str, Any]:
    """Load a SavedModel; return the gradients of a loss.

    They are by float inputs, and by variables with their name and value.
    """
    loaded = tf.saved_model.load(str(path))
    run = loaded.signatures["serving_default"]
    values = {name: tf.constant(value) for name, value in sample.items()}
    floats = {name: x for name, x in values.items() if x.dtype.is_floating}
    variables = [v for v in run.variables if v.dtype.is_floating]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch([*floats.values(), *variables])
        loss = loss_of(run(**values))
    if loss is None:
        return {}
    slopes = tape.gradient(loss, [*floats.values(), *variables])
    found = {("input", n): g for n, g in zip(floats, slopes, strict=False)}
    for variable, slope in zip(variables, slopes[len(floats) :], strict=True):
        value = variable.numpy()
        found["variable", variable.name.split(":")[0], value.tobytes()] = slope
    return {key: _dense(g) for key, g in found.items() if g is not None}


def _dense(gradient: Any) -> Array:
    return np.asarray(tf.convert_to_tensor(gradient))


def _ptq(folder: Path) -> Any:
    """Quantize by TFLite, in a process of its own: its converter may die."""
    command = [sys.executable, "-m", "zoo.ptq", str(folder)]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
    if ended.returncode:
        raise RuntimeError(f"TFLite's converter ended with {ended.returncode}")
    return kept(folder / "ptq.pickle")


def step_of(subject: Function, take: Callable[[Any, Any], Any]) -> Any:
    """Return a `tf.function` of the inputs, which gives gradients for training."""
    call = subject.train or subject.call

    @tf.function(autograph=False)
    def step(**inputs: Any) -> list[Any]:
        loss = loss_of(call(**inputs))
        return [
            None if g is None else tf.convert_to_tensor(g)
            for g in take(loss, subject.trainable)
        ]

    return step


def gradients_of(
    subject: Any, sample: Sample, take: Callable[[Any, Any], Any] = tf.gradients
) -> list[Array | None]:
    """Return the gradients of a training step, in the order of the variables."""
    if isinstance(subject, GraphOfVersion1):
        return _gradients_of_graph(subject, sample, take)
    step = step_of(subject, take)
    found = step(**{name: tf.constant(value) for name, value in sample.items()})
    return [None if g is None else g.numpy() for g in found]


def _gradients_of_graph(
    subject: GraphOfVersion1, sample: Sample, take: Callable[[Any, Any], Any]
) -> list[Array | None]:
    graph = subject.session.graph
    with graph.as_default(), flow_of(subject.control_flow_v2):
        variables = tf.compat.v1.trainable_variables()
        loss = loss_of(subject.outputs)
        slopes = [
            None if g is None else tf.convert_to_tensor(g)
            for g in take(loss, variables)
        ]
    feeds = {graph.get_tensor_by_name(f"{n}:0"): x for n, x in sample.items()}
    there = [g for g in slopes if g is not None]
    values = iter(subject.session.run(there, feeds))
    return [None if g is None else next(values) for g in slopes]


def repeated(
    entry: Entry, sample: Sample, *takes: Callable[[Any, Any], Any]
) -> list[list[Array | None]]:
    """Return gradients under op determinism: twice what each of `takes` gives."""
    from tensorflow.python.framework import config

    config.enable_op_determinism()
    try:
        return [gradients_of(built(entry), sample, t) for t in takes for _ in range(2)]
    finally:
        config.disable_op_determinism()


def fitted(subject: Any, sample: Sample) -> dict[str, Array] | None:
    """Return the weights after one step of `fit`; None for what is no network."""
    network = getattr(subject, "network", None)
    if network is None:
        return None
    module = tf.keras
    if not isinstance(network, tf.keras.Model):
        import tf_keras

        module = tf_keras

    def compute_loss(*args: Any, y_pred: Any = None, **kwargs: Any) -> Any:
        from zoo.subject import named

        return loss_of(named(y_pred if y_pred is not None else args[2]))

    network.compute_loss = compute_loss
    network.compile(module.optimizers.SGD(_RATE), jit_compile=False)
    x = dict(sample) if isinstance(network.input, dict) else list(sample.values())
    if not isinstance(network.input, dict | list | tuple):
        (x,) = sample.values()
    y = np.zeros([len(next(iter(sample.values()))), 1], np.float32)
    network.fit(x, y, batch_size=len(y), shuffle=False, verbose=0)
    return {str(i): np.asarray(v) for i, v in enumerate(network.weights)}


def check(folder: Path) -> None:
    """Load what geutil saved, and compare it with what the model was."""
    made = kept(folder / "made.pickle")
    found = {}
    for path in sorted((folder / "saved").iterdir()):
        found[path.name] = _tried(lambda p=path: _checked(p, made))
    keep(folder / "checked.pickle", found)


def _checked(path: Path, made: dict[str, Any]) -> dict[str, Any]:
    loaded = tf.saved_model.load(str(path)).signatures
    run = loaded["serving_default"]
    differences = [apart(_run(run, made["sample"]), made["outputs"])]
    for name, (sample, outputs) in made["others"].items():
        differences.append(apart(_run(loaded[name], sample), outputs))
    answer: dict[str, Any] = {"apart": max(differences)}
    wanted = made["slopes"]
    if isinstance(wanted, str):
        return answer
    slopes = _slopes(path, made["sample"])
    shared = [key for key in wanted if key in slopes]
    lost = [k for k in wanted if k[0] == "input" and k not in slopes]
    answer["lost"] = [str(key[:2]) for key in lost]
    answer["slopes"] = len(shared)
    pairs = [(slopes[key], wanted[key]) for key in shared]
    answer["slopes_apart"] = slopes_apart(pairs)
    return answer


def main() -> None:
    """Make a model, wait, and check."""
    name, folder, *journeys = sys.argv[1:]
    place = Path(folder)
    without_grappler()
    try:
        make(MODELS[name], place, journeys)
        assert "geutil" not in sys.modules
    except Exception as error:  # The row says so.
        traceback.print_exc()
        keep(place / "made.pickle", {"failed": f"{type(error).__name__}: {error}"})
        return
    if sys.stdin.readline():
        check(place)


if __name__ == "__main__":
    main()
