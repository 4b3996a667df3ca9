"""Samples of models that do more: which of them geutil tells, and another scanner.

`python -m benchmarks.scanners --modelscan PATH` writes all samples of `testdata.powers`
into a folder, none of which is run, asks `geutil.model.powers` about each, and has
modelscan look through the folder. PATH is its command, of an environment of its own
with `modelscan==0.8.8`, `tensorflow` and `h5py`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from geutil.errors import ModelError
from geutil.model import powers
from testdata.powers import FILES, HIDDEN, SAMPLES, save

_TOLD, _NOT = "told", "-"


class Row(NamedTuple):
    """A sample, and whether each of both tells it."""

    group: str
    name: str
    kind: str
    path: Path
    by_geutil: bool


def written(folder: Path) -> Iterator[Row]:
    """Write all samples, each into a folder of its own, and ask geutil about each."""
    kinds = {name: ("ops", kind) for name, (kind, _) in SAMPLES.items()}
    kinds |= dict.fromkeys(HIDDEN, ("hidden ops", "write files"))
    kinds |= {name: ("files", sample.kind) for name, sample in FILES.items()}
    graphs = {name: sample for name, (_, sample) in SAMPLES.items()} | HIDDEN
    for number, (name, (group, kind)) in enumerate(kinds.items()):
        scratch, place = folder / f"scratch{number}", folder / "all" / f"{number:03}"
        scratch.mkdir(parents=True)
        place.mkdir(parents=True)
        if name in graphs:
            path = scratch / "net"
            save(graphs[name], path, scratch / "marker")
        else:
            path = FILES[name].write(scratch, scratch / "marker")
        # What lies beside is not the model.
        target = place / path.name
        shutil.copytree(path, target, symlinks=True) if path.is_dir() else shutil.copy(
            path, target
        )
        yield Row(group, name, kind, target, _is_told(target, kind))


def _is_told(path: Path, kind: str) -> bool:
    try:
        return kind in {entry.kind for entry in powers(path).dangers}
    except ModelError:
        return False


def told_by_modelscan(command: str, folder: Path) -> set[str]:
    """Return the names of the folders in a folder that modelscan finds issues in."""
    report = folder.parent / "report.json"
    options = ["scan", "-p", str(folder), "-r", "json", "-o", str(report)]
    done = subprocess.run([command, *options], capture_output=True, check=False)
    if not report.exists():
        raise RuntimeError(done.stderr.decode(errors="replace")[-2000:])
    found = json.loads(report.read_text())
    return {Path(issue["source"]).parts[0].split(":")[0] for issue in found["issues"]}


def main() -> None:
    """Print the table, and a line for each group."""
    parser = argparse.ArgumentParser("python -m benchmarks.scanners")
    parser.add_argument("--modelscan", help="its command; without it geutil alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = list(written(Path(name)))
        others: set[str] = set()
        if options.modelscan:
            others = told_by_modelscan(options.modelscan, Path(name) / "all")
        print(f"{'sample':36} {'power':18} geutil  modelscan")
        for row in rows:
            ours = _TOLD if row.by_geutil else _NOT
            theirs = _TOLD if row.path.parent.name in others else _NOT
            print(f"{row.name:36} {row.kind:18} {ours:7} {theirs}")
        for group in dict.fromkeys(row.group for row in rows):
            mine = [row for row in rows if row.group == group]
            ours = sum(row.by_geutil for row in mine)
            theirs = sum(row.path.parent.name in others for row in mine)
            print(f"{group}: {len(mine)}, geutil {ours}, modelscan {theirs}")


if __name__ == "__main__":
    main()
