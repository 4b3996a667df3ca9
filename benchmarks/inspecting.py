"""Inspection of models: seconds, and peak memory against the MetaGraph's size.

Of large ones, and of a small one by the command, whose start is most of it.

`python -m benchmarks.inspecting PATH` is the process that is measured: it prints the
seconds and the bytes by which the peak of its resident memory grew.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import numpy as np
import tensorflow as tf

from benchmarks.graphs import random_graph_def
from benchmarks.resident import forget_peak, resident_peak
from benchmarks.rows import Row
from geutil.graph.protos import SavedModel
from geutil.model.files.inspect_files import inspect

LIMIT_SECONDS = 5.0
LIMIT_MEMORY = 1.5
LIMIT_START = 1.0
"""Seconds of the command for a small model."""
LIMIT_IMPORT = 0.1
MIB = 1 << 20
_QUICKLY = 8


def rows(quick: bool) -> Iterator[Row]:
    scale = _QUICKLY if quick else 1
    for name, write in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            write(path, scale)
            proto = (path / "saved_model.pb").stat().st_size
            seconds, peak = in_a_child(path)
            total = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
            size = f"{total / MIB:,.0f} MiB"
            limit = LIMIT_SECONDS * 1e3
            yield Row("inspect", f"inspect, {name}", size, seconds * 1e3, None, limit)
            yield Row(
                "inspect",
                f"peak memory of inspect, {name}",
                size,
                peak / MIB,
                proto / MIB,
                LIMIT_MEMORY,
                unit="MiB",
                note="baseline: the MetaGraph's size",
            )
    yield from _starts()


def _starts() -> Iterator[Row]:
    """Yield what it takes to start: medians of processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net"
        module = tf.Module()
        module.weight = tf.Variable(tf.ones([16, 16]))
        module.call = tf.function(
            lambda x: x @ module.weight,
            input_signature=[tf.TensorSpec([None, 16], tf.float32)],
        )
        tf.saved_model.save(module, str(path), signatures=module.call)
        command = f"import sys; sys.argv = ['geutil', 'inspect', {str(path)!r}]; "
        inspecting = _median(command + "from geutil.cli.main import main; main()")
        work = "`geutil inspect` of a small model"
        yield Row("inspect", work, "", inspecting * 1e3, None, LIMIT_START * 1e3)
        ours, theirs = _median("import geutil"), _median("import tensorflow")
        yield Row(
            "inspect",
            "import geutil",
            "",
            ours * 1e3,
            theirs * 1e3,
            LIMIT_IMPORT,
            note="baseline: import tensorflow",
        )


def _median(code: str) -> float:
    return sorted(_seconds(code) for _ in range(5))[2]


def _seconds(code: str) -> float:
    start = perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    return perf_counter() - start


def write_constants(path: Path, scale: int = 1) -> None:
    """A frozen model: a GiB of constants in saved_model.pb."""
    graph_def = tf.compat.v1.GraphDef()
    value = np.ones(16 * MIB // scale, np.float32)
    for i in range(16):
        node = graph_def.node.add(name=f"weights{i}", op="Const")
        node.attr["dtype"].type = tf.float32.as_datatype_enum
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
    _write(path, graph_def)


def write_variables(path: Path, scale: int = 1) -> None:
    """A model with a GiB of variables beside a small graph."""
    module = tf.Module()
    module.variables_ = [tf.Variable(tf.ones([16 * MIB // scale])) for _ in range(16)]
    module.call = tf.function(
        lambda x: x + module.variables_[0][0],
        input_signature=[tf.TensorSpec([], tf.float32)],
    )
    tf.saved_model.save(module, str(path), signatures=module.call)


def write_nodes(path: Path, scale: int = 1) -> None:
    """A model of half a million nodes: never a GiB, but what takes longest."""
    del scale  # In a small one, what does not grow with the graph would weigh more.
    _write(path, random_graph_def(500_000, reach=50))


MODELS: dict[str, Callable[[Path, int], None]] = {
    "constants": write_constants,
    "variables": write_variables,
    "500,000 nodes": write_nodes,
}


def _write(path: Path, graph_def: tf.compat.v1.GraphDef) -> None:
    saved_model = SavedModel(saved_model_schema_version=1)
    meta_graph = saved_model.meta_graphs.add()
    meta_graph.meta_info_def.tags.append("serve")
    meta_graph.graph_def.CopyFrom(graph_def)
    (path / "saved_model.pb").write_bytes(saved_model.SerializeToString())


def in_a_child(path: Path) -> tuple[float, int]:
    """Return the seconds and the added bytes of an inspection in a new process."""
    command = [sys.executable, "-m", "benchmarks.inspecting", str(path)]
    child = subprocess.run(command, capture_output=True, check=False, text=True)
    if child.returncode:
        raise RuntimeError(f"inspecting '{path}' failed:\n{child.stderr}")
    seconds, peak = child.stdout.split()
    return float(seconds), int(peak)


def main() -> None:
    # So that the peak of the imports does not hide what comes.
    before = forget_peak()
    start = perf_counter()
    inspect(sys.argv[1])
    seconds = perf_counter() - start
    sys.stdout.write(f"{seconds} {max(0, resident_peak() - before)}\n")


if __name__ == "__main__":
    main()
