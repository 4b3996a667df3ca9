"""The peak memory of a walk and of a view, each in a process of its own.

`python -m benchmarks.memory WORK FILE` is that process: it reads a serialized GraphDef
and prints the peak in bytes an op.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import tensorflow as tf

import geutil as ge
from benchmarks.graphs import Case, import_graph
from benchmarks.rows import Row

LIMIT_BYTES = 200.0
Work = Callable[[], Any]

WORKS: dict[str, Callable[[Case], Work]] = {
    "backward walk": lambda case: _walk(ge.get_backward_walk_ops, case.sinks()),
    "forward walk": lambda case: _walk(ge.get_forward_walk_ops, case.sources()),
    # Looked up before the peak is measured: the name imports the modules behind it.
    "make_view": lambda case: partial(ge.make_view, case.graph),
}


def rows(case: Case) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "graph.pb"
        file.write_bytes(case.graph_def.SerializeToString())
        for work in WORKS:
            yield Row(
                "memory",
                f"peak memory, {work}",
                case.name,
                _in_a_child(work, file),
                None,
                LIMIT_BYTES,
                unit="B/op",
            )


def _in_a_child(work: str, file: Path) -> float:
    command = [sys.executable, "-m", "benchmarks.memory", work, str(file)]
    child = subprocess.run(command, capture_output=True, check=False, text=True)
    # TensorFlow's start-up messages go to stderr too: shown only with a failure.
    if child.returncode:
        raise RuntimeError(f"measuring '{work}' failed:\n{child.stderr}")
    return float(child.stdout)


def peak_bytes(work: str, graph_def: tf.compat.v1.GraphDef) -> float:
    """Return what the work needs at its peak, in bytes an op."""
    case = Case("", lambda: import_graph(graph_def), "")
    # What TensorFlow makes when it is first asked belongs to the graph, not to us.
    case.settle()
    run = WORKS[work](case)
    gc.collect()
    tracemalloc.start()
    result = run()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del result
    return peak / len(case.ops)


def _walk(walk: Callable[[Any], list[Any]], seeds: list[Any]) -> Work:
    return lambda: walk(seeds)


def main() -> None:
    work, file = sys.argv[1:]
    graph_def = tf.compat.v1.GraphDef.FromString(Path(file).read_bytes())
    print(peak_bytes(work, graph_def))


if __name__ == "__main__":
    main()
