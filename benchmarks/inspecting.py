"""Inspection of models: seconds, and peak memory against the MetaGraph's size.

Of large ones, and of a small one by the command, whose start is most of it.

`python -m benchmarks.inspecting PATH` is the process that is measured: it prints the
seconds and the bytes by which the peak of its resident memory grew. With `--fields` or
`--batches` it prints the measurements that numbers of `geutil.model.files.wire` come
from.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from time import perf_counter, process_time

import numpy as np
import tensorflow as tf

from benchmarks.graphs import random_graph_def
from benchmarks.resident import forget_peak, resident_peak
from benchmarks.rows import Row
from geutil.errors import ModelError
from geutil.graph.protos import SavedModel
from geutil.model.files import wire
from geutil.model.files.proto_files import inspect

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


def example_nodes() -> bytes:
    """Return the nodes of a model's functions, as those of a `GraphDef`."""
    data = Path("testdata/two_signatures/saved_model.pb").read_bytes()
    (meta_graph,) = wire.spans(data, (0, len(data)), "SavedModel.meta_graphs")
    (graph,) = wire.spans(data, meta_graph, "MetaGraphDef.graph_def")
    return b"".join(
        wire.length_delimited(1, data[start:end])
        for library in wire.spans(data, graph, "GraphDef.library")
        for function in wire.spans(data, library, "FunctionDefLibrary.function")
        for start, end in wire.spans(data, function, 3)
    )


def print_fields(damages: int = 1500) -> None:
    """Print how many damaged files are taken for another kind, by the fields read."""
    nodes = example_nodes()
    files = {"GraphDef": nodes, "MetaGraphDef": wire.length_delimited(2, nodes)}
    for count in (1, 2, 3, 4, 8, 16, 32, 64):
        wire._LOOKED_AT = count
        for kind, data in files.items():
            randomly, told = Random(2), Counter[bool]()
            for _ in range(damages):
                damaged = bytearray(data)
                for _ in range(8):
                    place = randomly.randrange(min(len(data), 1500))
                    damaged[place] ^= 1 << randomly.randrange(8)
                with suppress(ModelError):
                    told[wire.binary_kind(bytes(damaged)) == kind] += 1
            print(f"{count} fields, {kind}: {told[False]} of {told.total()} wrong")


def print_batches() -> None:
    """Print CPU seconds and memory by the bytes of nodes that are parsed at a time."""
    with tempfile.NamedTemporaryFile(suffix=".pb") as file:
        nodes = example_nodes()
        for _ in range(38 * MIB // len(nodes)):
            file.write(nodes)
        file.flush()
        for power in range(12, 23, 2):
            wire._BATCH = 1 << power
            before, start = forget_peak(), process_time()
            inspect(file.name)
            seconds, peak = process_time() - start, resident_peak() - before
            print(f"2^{power} bytes: {seconds:.2f} CPU s, {peak / MIB:.0f} MiB")


def main() -> None:
    measurements = {"--fields": print_fields, "--batches": print_batches}
    if sys.argv[1] in measurements:
        measurements[sys.argv[1]]()
        return
    # So that the peak of the imports does not hide what comes.
    before = forget_peak()
    start = perf_counter()
    inspect(sys.argv[1])
    seconds = perf_counter() - start
    sys.stdout.write(f"{seconds} {max(0, resident_peak() - before)}\n")


if __name__ == "__main__":
    main()
