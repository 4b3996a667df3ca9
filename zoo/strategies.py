"""Networks under MirroredStrategy on two devices, next to one device.

`python -m zoo.strategies` takes networks of keras.applications, each in a process of
its own with two logical CPU devices, through a training step with memory-saving
gradients, with norms folded for training, and with FakeQuant ops that are learnt. What
is done is noted in `strategies.json` beside this file; a second run goes on from there.
`python -m zoo --page` writes it into the page.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zoo.models.applications import NAMES

NOTES = Path(__file__).with_name("strategies.json")
_SLOW = ("InceptionResNetV2",)
NETWORKS = tuple(name for name in NAMES if name not in _SLOW)
WAYS = {
    "memory": 'gradients with "memory", next to plain ones under the strategy',
    "fold": "gradients after a fold for training, next to no fold",
    "moved": "plain gradients, the input changed by 1e-7",
    "quantize": "loss, folded and FakeQuant training, next to one device",
    "ranges": "learnt ranges after two steps, next to one device",
}
BATCH, PIXELS, STEPS, LIMIT_S = 8, 64, 2, 1500
_SIZES = {"InceptionV3": 96, "Xception": 96}
_MOVED = 1e-7
"""By how much inputs are changed, to see what rounding does."""


def noted() -> dict[str, dict[str, Any]]:
    """Return what is noted, by network."""
    found: dict[str, Any] = {}
    if NOTES.exists():
        found = json.loads(NOTES.read_text(encoding="utf-8"))
    return found


def table(notes: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table of what was noted."""
    yield f"| model | {' | '.join(WAYS.values())} | replicas alike |"
    yield f"|{' --- |' * (len(WAYS) + 2)}"
    for name, found in notes.items():
        if "error" in found:
            yield f"| {name} | **{found['error'][:200]}** |" + " |" * len(WAYS)
            continue
        cells = [_cell(found.get(way)) for way in WAYS]
        alike = "yes" if found["alike"] else "**no**"
        yield f"| {name} | {' | '.join(cells)} | {alike} |"


def _cell(difference: float | None) -> str:
    return "no norm" if difference is None else f"{difference:.1e}"


def measured(name: str) -> dict[str, Any]:
    """Take a network through all ways; in a process with two devices."""
    import numpy as np
    import tensorflow as tf

    device = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        device, [tf.config.LogicalDeviceConfiguration()] * 2
    )
    begin = time.perf_counter()
    steps: dict[str, Steps] = {}
    for kind in ("one", "two"):
        devices = ["CPU:0", "CPU:1"][: 1 + (kind == "two")]
        strategy = tf.distribute.MirroredStrategy(devices)
        tf.keras.utils.set_random_seed(0)
        with strategy.scope():
            network = built(name)
        steps[kind] = Steps(strategy, network)
    one, two = steps["one"], steps["two"]
    shape = one.network.inputs[0].shape[1:]
    x = np.float32(np.random.default_rng(0).uniform(-1, 1, [BATCH, *shape]))
    plain = two.gradients(x, [])
    found: dict[str, Any] = {"memory": _apart(plain, two.gradients(x, ["memory"]))}
    found["fold"] = None
    if any("BatchNormalization" in type(v).__name__ for v in one.layers()):
        found["fold"] = _apart(plain, two.gradients(x, ["fold"]))
    moved = x * np.float32(1 + _MOVED)
    found["moved"] = _apart(plain, two.gradients(moved, []))
    losses, ranges, copies = zip(*(s.quantized(x) for s in (one, two)), strict=True)
    found["quantize"] = _apart(*([np.array(values)] for values in losses))
    found["ranges"] = _apart(*ranges)
    found["alike"] = bool(copies[1])
    found["seconds"] = round(time.perf_counter() - begin)
    return found


def built(name: str) -> Any:
    """Return a network of keras.applications whose norms and biases do something."""
    import tensorflow as tf

    from zoo.subject import perturb

    size = _SIZES.get(name, PIXELS)
    make = getattr(tf.keras.applications, name)
    options: dict[str, Any] = {"classifier_activation": None, "classes": 10}
    if "include_preprocessing" in inspect.signature(make).parameters:
        options["include_preprocessing"] = False
    network = make(weights=None, input_shape=(size, size, 3), **options)
    perturb(network)
    return network


def _apart(expected: Sequence[Any], found: Sequence[Any]) -> float:
    """Return the largest difference, as a part of the largest value of all."""
    import numpy as np

    size = max(np.abs(a).max() for a in expected)
    return float(
        max(np.abs(a - b).max() for a, b in zip(expected, found, strict=True)) / size
    )


class Steps:
    """Steps of a network under a strategy."""

    def __init__(self, strategy: Any, network: Any) -> None:
        self.strategy, self.network = strategy, network
        # The states of random numbers among them.
        self._start = [v.numpy() for v in network.variables]

    def reset(self) -> None:
        """Give the network the state that it had."""
        for variable, value in zip(self.network.variables, self._start, strict=True):
            variable.assign(value)

    def layers(self) -> list[Any]:
        """Return the layers, those of inner models too."""
        return list(self.network._flatten_layers())

    def gradients(self, x: Any, edits: Sequence[str]) -> list[Any]:
        """Return the loss and the gradients of a step in training."""
        import tensorflow as tf

        from geutil.batchnorm import fold_batch_norms
        from geutil.gradients import gradients

        self.reset()
        weights = [v.value for v in self.network.trainable_variables]

        def replica(x: Any) -> Any:
            y = self.network(x, training=True)
            if "fold" in edits:
                fold_batch_norms(tf.compat.v1.get_default_graph(), is_training=True)
            loss = tf.reduce_sum(tf.square(y - 0.1)) / BATCH
            if "memory" in edits:
                found = gradients(loss, weights, checkpoints="memory")
            else:
                found = tf.gradients(loss, weights)
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, [loss, *found])

        results = self._run(replica, x)
        return [self._local(value)[0].numpy() for value in results]

    def quantized(self, x: Any) -> tuple[list[float], list[Any], bool]:
        """Return losses, ranges, and whether the copies of these are alike."""
        import numpy as np
        import tensorflow as tf

        from geutil.batchnorm import fold_batch_norms
        from geutil.quantize import quantize

        self.reset()
        reports: list[Any] = []

        def replica(x: Any) -> Any:
            y = self.network(x, training=False)
            graph = tf.compat.v1.get_default_graph()
            fold_batch_norms(graph)
            reports.append(quantize(graph, ema_decay=0.9))
            loss = tf.reduce_sum(tf.square(reports[-1].tensor(y) - 0.1)) / BATCH
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, loss)

        step = tf.function(lambda v: self.strategy.run(replica, args=(v,)))
        losses = [
            float(self._local(step(self._spread(x * scale)))[0])
            for scale in np.linspace(1.0, 1.5, STEPS, dtype=np.float32)
        ]
        variables = reports[0].variables.values()
        copies = [[c.numpy() for c in self._local(v)] for v in variables]
        alike = all(np.array_equal(c[0], c[-1]) for c in copies)
        return losses, [c[0] for c in copies], alike

    def _run(self, replica: Callable[[Any], Any], x: Any) -> Any:
        import tensorflow as tf

        step = tf.function(lambda v: self.strategy.run(replica, args=(v,)))
        return step(self._spread(x))

    def _spread(self, x: Any) -> Any:
        import tensorflow as tf

        def part(context: Any) -> Any:
            size = BATCH // context.num_replicas_in_sync
            start = context.replica_id_in_sync_group * size
            return tf.constant(x[start : start + size])

        return self.strategy.experimental_distribute_values_from_function(part)

    def _local(self, value: Any) -> Any:
        return self.strategy.experimental_local_results(value)


def in_a_process(name: str) -> dict[str, Any]:
    """Take a network through all ways in a new process, within a limit of time."""
    command = [sys.executable, "-m", "zoo.strategies", "--child", name]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(
            command,
            check=False,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {LIMIT_S} s"}
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Take all networks that are not noted yet, and print the table."""
    parser = argparse.ArgumentParser("python -m zoo.strategies")
    parser.add_argument("--only", action="append", choices=NETWORKS)
    parser.add_argument("--child", choices=NETWORKS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measured(options.child)))
        return
    notes = noted()
    for name in options.only or NETWORKS:
        if name not in notes or options.only:
            notes[name] = in_a_process(name)
            kept = {n: notes[n] for n in NETWORKS if n in notes}
            NOTES.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        print(name, notes[name], flush=True)
    print("\n".join(table(notes)))


if __name__ == "__main__":
    main()
