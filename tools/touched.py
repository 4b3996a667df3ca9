"""Runs the tests that a change reaches: `make test-touched`.

A test file is run if it, or a helper module that it imports, has changed or imports,
over any number of steps, a module of the package that has. The imports are read from
the source; a page of the documentation imports the modules that its code names. The
files left out are printed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import networkx as nx

from tools.house import ROOT, Module, imported_names

FOLDERS = ("geutil", "tests", "tools", "benchmarks", "zoo", "examples")
EVERYTHING = frozenset(
    ("setup.py", "pyproject.toml", "Makefile", "conftest.py", "tests/conftest.py")
)
"""A change of one of these reaches all tests."""
DATA = {
    "web": ["geutil.report"],
    "geutil/report/static": ["geutil.report"],
    "geutil/capabilities/ops.tsv": ["geutil.capabilities"],
    "testdata": ["tests.test_testdata"],
}
"""The modules that read files which are no modules, by the folders of the files."""


def changed_files(base: str, root: Path = ROOT) -> list[str]:
    """Return the files that differ from a revision, with those that git does not know.

    Raises:
        SystemExit: git does not know the revision.
    """
    commands = (
        ["git", "diff", "--name-only", base],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    found: set[str] = set()
    for command in commands:
        done = subprocess.run(
            command, cwd=root, check=False, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"error: {done.stderr.strip()}")
        found.update(done.stdout.splitlines())
    return sorted(found)


def read_sources(root: Path = ROOT) -> list[Module]:
    """Return all modules of the tree: the package, its tests and what they use."""
    modules = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules.append(Module(name, path.relative_to(root), path.read_text()))
    return modules


def pages(root: Path = ROOT) -> dict[str, set[str]]:
    """Return the modules of the package that the code of each page names."""
    found = {}
    for path in [*sorted((root / "docs").rglob("*.md")), root / "README.md"]:
        text = path.read_text(encoding="utf-8")
        names = set(re.findall(r"\bgeutil(?:\.[a-z_0-9]+)*", text))
        for home, members in re.findall(r"from (geutil[\w.]*) import ([\w, ]+)", text):
            names |= {f"{home}.{member.strip()}" for member in members.split(",")}
        found[path.relative_to(root).as_posix()] = names
    return found


def import_graph(
    modules: Collection[Module], texts: Mapping[str, Iterable[str]]
) -> nx.DiGraph:
    """Return the graph from modules, by name, and pages, to what they import."""
    names = {module.name for module in modules}
    graph = nx.DiGraph()
    graph.add_nodes_from([*names, *texts])

    def link(source: str, imported: str) -> None:
        # A name that is no module is one of the longest module that it begins with.
        while imported and imported not in names:
            imported = imported.rpartition(".")[0]
        if imported and imported != source:
            graph.add_edge(source, imported)

    for module in modules:
        for imported in imported_names(module.nodes):
            link(module.name, imported)
        if module.path.parts[0] == "tests":
            # Fixtures come without an import.
            for folder in module.path.parents:
                link(module.name, ".".join((*folder.parts, "conftest")))
    for page, imports in texts.items():
        for imported in imports:
            link(page, imported)
    return graph


def is_test(path: str) -> bool:
    """Tell whether pytest collects a file: tests, doctests and pages."""
    name = path.rpartition("/")[2]
    return path.endswith(".py") and (
        path.startswith("geutil/") or name.startswith("test_")
    )


def split(changed: Iterable[str], root: Path = ROOT) -> tuple[list[str], list[str]]:
    """Return the files of tests that some changed files reach, and the others."""
    modules, texts = read_sources(root), pages(root)
    graph = import_graph(modules, texts)
    by_path = {module.path.as_posix(): module.name for module in modules}
    starts: set[str] = set()
    whole = False
    for path in changed:
        whole |= path in EVERYTHING
        if path in by_path:
            starts.add(by_path[path])
        elif path in texts:
            starts.add(path)
        else:
            readers = (of for at, of in DATA.items() if path.startswith(at))
            starts.update(name for names in readers for name in names)
    reached = set(starts)
    for start in starts & set(graph):
        reached |= nx.ancestors(graph, start)
    files = {p: name for p, name in by_path.items() if is_test(p)}
    files |= {page: page for page in texts if page != "README.md"}
    run = [path for path, name in sorted(files.items()) if whole or name in reached]
    return run, sorted(set(files) - set(run))


def by_folder(paths: Iterable[str]) -> list[str]:
    """Return a line for each folder, with the names of its files."""
    folders: dict[str, list[str]] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        folders.setdefault(folder, []).append(name)
    return [
        f"  {folder} ({len(names)}): {' '.join(names)}"
        for folder, names in folders.items()
    ] or ["  none"]


def main() -> None:
    """Run pytest on the tests that the change reaches; print what is left out."""
    parser = argparse.ArgumentParser(prog="make test-touched", description=__doc__)
    parser.add_argument("--base", default="HEAD", help="the revision before the change")
    parser.add_argument("--list", action="store_true", help="run none of them")
    options, arguments = parser.parse_known_args()
    changed = changed_files(options.base)
    run, left = split(changed)
    print(f"{len(changed)} files differ from {options.base}; they reach these tests:")
    print(*by_folder(run), "left out:", *by_folder(left), sep="\n", flush=True)
    if run and not options.list:
        command = [sys.executable, "-m", "pytest", *arguments, *run]
        raise SystemExit(subprocess.run(command, cwd=ROOT, check=False).returncode)


if __name__ == "__main__":
    main()
