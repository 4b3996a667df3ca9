"""Measures what `make test` misses of what `make test-all` sees: coverage, mutants.

`make coverage` runs both under coverage.py and prints the shares of lines and branches
that run. `make mutants` changes the package in some places, one at a time, the same in
each run, and tells whether the quick tests that run there fail, and if not, whether the
thorough ones do. It needs what `make coverage` wrote. Tests that run a process of their
own count for what they run themselves.
"""

from __future__ import annotations

import argparse
import ast
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from coverage import Coverage, CoverageData

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "geutil"
FOLDER = ROOT / "build" / "coverage"
QUICK, ALL = FOLDER / "quick", FOLDER / "all"
SECONDS = 600
"""How long the tests of one mutant may take."""
MOST = 300
"""How many quick, and how many thorough tests are tried on one mutant at most."""
OTHERS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
"""Operators, and what each is changed into."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        path: the file, from the root.
        line: the line of the change, from 1 up.
        begin: where in that line the old text begins, and where it ends.
        end: the same.
        text: the new text.
    """

    path: str
    line: int
    begin: int
    end: int
    text: str

    def apply(self, root: Path) -> None:
        """Write the file with the change."""
        target = root / self.path
        lines = target.read_text(encoding="utf-8").splitlines(keepends=True)
        old = lines[self.line - 1]
        lines[self.line - 1] = old[: self.begin] + self.text + old[self.end :]
        target.write_text("".join(lines), encoding="utf-8")

    def describe(self) -> str:
        """Return the place, the old text and the new one."""
        lines = (ROOT / self.path).read_text(encoding="utf-8").splitlines()
        old = lines[self.line - 1][self.begin : self.end]
        return f"{self.path}:{self.line}: {old.strip()} -> {self.text.strip()}"


def read_shares(paths: Sequence[Path]) -> tuple[float, float]:
    """Return the percent of lines, and of branches, that runs together cover."""
    with tempfile.TemporaryDirectory() as folder:
        joined = Coverage(data_file=str(Path(folder, "joined")), branch=True)
        joined.combine([str(path) for path in paths], keep=True)
        lines = run = branches = taken = 0
        for name in joined.get_data().measured_files():
            numbers = joined._analyze(name).numbers
            lines += numbers.n_statements
            run += numbers.n_executed
            branches += numbers.n_branches
            taken += numbers.n_executed_branches
    return 100 * run / lines, 100 * taken / branches


def print_coverage() -> None:
    """Print the shares of the quick tests, and of all."""
    rows = {"make test": [QUICK], "make test-all": [QUICK, ALL]}
    for title, paths in rows.items():
        lines, branches = read_shares(paths)
        print(f"{title:14} lines {lines:6.2f} %  branches {branches:6.2f} %")


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Return every change of one file: operators, numbers, conditions."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    name = path.relative_to(ROOT).as_posix()

    def between(left: ast.expr, right: ast.expr, operator: type) -> Iterator[Mutant]:
        old, new = OTHERS.get(operator, ("", ""))
        if not old or left.end_lineno != right.lineno:
            return
        begin = left.end_col_offset or 0
        place = lines[right.lineno - 1].find(f" {old} ", begin, right.col_offset)
        if place >= 0:
            yield Mutant(name, right.lineno, place + 1, place + 1 + len(old), new)

    tree = ast.parse(source)
    notes = {id(n) for node in ast.walk(tree) for n in _annotations(node)}
    for node in ast.walk(tree):
        if id(node) in notes or not hasattr(node, "lineno"):
            continue
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from between(node.left, node.comparators[0], type(node.ops[0]))
        elif isinstance(node, ast.BoolOp):
            yield from between(node.values[0], node.values[1], type(node.op))
        elif isinstance(node, ast.BinOp):
            yield from between(node.left, node.right, type(node.op))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            end = node.col_offset + len("not ")
            yield Mutant(name, node.lineno, node.col_offset, end, "")
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            begin, end = node.col_offset, node.end_col_offset or 0
            yield Mutant(name, node.lineno, begin, end, str(node.value + 1))


def _annotations(node: ast.AST) -> Iterator[ast.AST]:
    """Return all nodes of the types that a node is annotated with."""
    for field in ("annotation", "returns"):
        noted = getattr(node, field, None)
        if isinstance(noted, ast.AST):
            yield from ast.walk(noted)


def packages() -> list[list[Path]]:
    """Return the files of each package."""
    folders = sorted((ROOT / PACKAGE).iterdir())
    return [
        sorted(folder.rglob("*.py"))
        for folder in folders
        if (folder / "__init__.py").exists()
    ]


def named(words: Iterable[str]) -> list[list[Path]]:
    """Return, for each word, the files of the package whose path holds it.

    Raises:
        ValueError: no path holds a word.
    """
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    groups = []
    for word in words:
        groups.append([f for f in files if word in f.relative_to(ROOT).as_posix()])
        if not groups[-1]:
            raise ValueError(f"no file of {PACKAGE} is called {word}")
    return groups


def choose(count: int, seed: int, groups: Sequence[Sequence[Path]]) -> list[Mutant]:
    """Return so many changes, spread over groups of files, the same for a seed."""
    draw = random.Random(seed)
    chosen = []
    for place, files in enumerate(groups):
        offered = [mutant for path in files for mutant in mutants_of(path)]
        share = (place + 1) * count // len(groups) - place * count // len(groups)
        chosen += draw.sample(offered, share)
    return chosen


def tests_at(mutant: Mutant, path: Path) -> list[str]:
    """Return the tests that run a line, in an order drawn once and for all.

    A line that runs on import alone has all tests that run anything of its file.
    """
    data = CoverageData(str(path))
    data.read()
    by_line = data.contexts_by_lineno(str(ROOT / mutant.path))
    contexts = set(by_line.get(mutant.line, ()))
    if contexts == {""}:
        contexts = {context for several in by_line.values() for context in several}
    names = sorted({_runnable(context) for context in contexts - {""}})
    random.Random(0).shuffle(names)
    return names


def _runnable(context: str) -> str:
    """Return the test of a context; of a block of a page the page, to run it all."""
    name = context.rpartition("|")[0]
    page, _, _ = name.partition("::")
    return page if page.endswith(".md") else name


def fails(tests: Iterable[str], root: Path) -> bool:
    """Tell whether one of some tests fails in a copy, or cannot run, or takes too long.

    Raises:
        ValueError: there is no such test: the coverage is of other tests.
    """
    listed = root / "build" / "tests.txt"
    listed.parent.mkdir(exist_ok=True)
    listed.write_text("\n".join(tests) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    try:
        ended = subprocess.run(
            [*command, f"@{listed}"],
            cwd=root,
            capture_output=True,
            check=False,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return True
    unknown = [line for line in ended.stderr.splitlines() if "not found: " in line]
    if unknown:
        raise ValueError(unknown[0])
    return ended.returncode != 0


def verdict(mutant: Mutant, root: Path) -> str:
    """Return who notices a change: quick tests, thorough ones, nobody."""
    quick = tests_at(mutant, QUICK)
    others = [name for name in tests_at(mutant, ALL) if name not in set(quick)]
    before = (root / mutant.path).read_text(encoding="utf-8")
    mutant.apply(root)
    try:
        if quick and fails(quick[:MOST], root):
            return "quick"
        if others and fails(others[:MOST], root):
            return "thorough"
        return "nobody" if quick or others else "never run"
    finally:
        (root / mutant.path).write_text(before, encoding="utf-8")


def print_mutants(mutants: Sequence[Mutant], jobs: int) -> None:
    """Try mutants in copies of the tree, and print who notices each."""
    with tempfile.TemporaryDirectory() as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        left_out = shutil.ignore_patterns(".git", ".venv*", "build", "dist", ".*_cache")
        for place in range(jobs):
            root = Path(folder, f"copy{place}")
            shutil.copytree(ROOT, root, ignore=left_out)
            copies.put(root)

        def attempt(mutant: Mutant) -> str:
            root = copies.get()
            try:
                told = verdict(mutant, root)
            finally:
                copies.put(root)
            print(f"{told:10}{mutant.describe()}", flush=True)
            return told

        with ThreadPoolExecutor(jobs) as pool:
            verdicts = list(pool.map(attempt, mutants))
    quick = verdicts.count("quick")
    print(f"noticed by make test: {quick} of {len(verdicts)}")
    print(f"noticed by make test-all: {quick + verdicts.count('thorough')}")


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(prog="strength", description=__doc__)
    parser.add_argument("what", choices=["coverage", "mutants"])
    parser.add_argument("--count", type=int, default=60, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="how many at once")
    parser.add_argument(
        "--named",
        nargs="+",
        metavar="WORD",
        help="spread them over the files whose paths hold each word, not over packages",
    )
    asked = parser.parse_args()
    if asked.what == "coverage":
        print_coverage()
    else:
        groups = named(asked.named) if asked.named else packages()
        print_mutants(choose(asked.count, asked.seed, groups), asked.jobs)


if __name__ == "__main__":
    main()
