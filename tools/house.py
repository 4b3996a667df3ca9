"""Measures how the package is laid out: files, imports, names, comments, its map.

`make house` prints the table. All but the files that a call enters is read from the
source; those are counted while small examples run, which needs TensorFlow. `--fast`
leaves them out. `--peers networkx typer` measures installed packages in the same way,
where a row has a meaning for any package: they are read, not imported.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import Any

import networkx as nx

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "geutil"
MAP = Path("docs", "architecture.md")
PRIVATE = ("tensorflow.python.", "tensorflow.core.")
"""How the names of TensorFlow's private modules begin."""
LONG = 15
"""Functions of more code lines than this ask for a docstring or a comment."""
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
"""Tokens that make no line a line of code."""
OP_TYPE = re.compile(r"_?[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*")


@dataclass(frozen=True)
class Module:
    """A module of the package: its name, its file and its source."""

    name: str
    path: Path
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.source)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def imported(self) -> list[str]:
        """What is imported anywhere: deferred imports and those for types, too."""
        return list(imported_names(self.nodes))

    @cached_property
    def code_lines(self) -> set[int]:
        """The lines that hold code: no comments, docstrings or blank lines."""
        lines = set()
        for token in self._tokens:
            if token.type not in LAYOUT:
                lines |= {*range(token.start[0], token.end[0] + 1)}
        for node in self.nodes:
            if is_text(node):
                lines -= lines_of(node)
        return lines

    @cached_property
    def comment_lines(self) -> set[int]:
        """The lines that hold a comment."""
        return {t.start[0] for t in self._tokens if t.type == tokenize.COMMENT}

    @cached_property
    def import_lines(self) -> set[int]:
        """The lines of import statements."""
        found = (n for n in self.nodes if isinstance(n, ast.Import | ast.ImportFrom))
        return {line for node in found for line in lines_of(node)}

    @cached_property
    def _tokens(self) -> list[tokenize.TokenInfo]:
        return list(tokenize.generate_tokens(io.StringIO(self.source).readline))


def imported_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the dotted names that the import statements among some nodes ask for."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # With the names: each may be a module.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_text(node: ast.AST) -> bool:
    """Tell whether a statement is a string, as docstrings are."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def lines_of(node: Any) -> set[int]:
    """Return the lines that a node is on."""
    return {*range(node.lineno, node.end_lineno + 1)}


def read_modules(root: Path, package: str = PACKAGE) -> list[Module]:
    """Return the modules of a package in order of their files, tests apart."""
    modules = []
    for path in sorted((root / package).rglob("*.py")):
        if "tests" in path.relative_to(root).parts:
            continue
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules.append(Module(name, path.relative_to(root), path.read_text()))
    return modules


def import_graph(modules: Collection[Module]) -> nx.DiGraph[str]:
    """Return the graph of which module imports which.

    A name that is imported from a package is the package's, unless it is a module.
    """
    names = {module.name for module in modules}
    graph: nx.DiGraph[str] = nx.DiGraph()
    for module in modules:
        for imported in module.imported:
            home = imported.rpartition(".")[0]
            target = imported if imported in names else home
            if target in names and target != module.name:
                graph.add_edge(module.name, target)
    return graph


def import_circles(modules: Collection[Module]) -> list[list[str]]:
    """Return the sets of modules that import each other, large ones first."""
    graph = import_graph(modules)
    found = (sorted(c) for c in nx.strongly_connected_components(graph) if len(c) > 1)
    return sorted(found, key=lambda circle: (-len(circle), circle))


def private_imports(nodes: Iterable[ast.AST]) -> list[str]:
    """Return the names in TensorFlow's private packages that are imported."""
    return [n for n in imported_names(nodes) if f"{n}.".startswith(PRIVATE)]


def doubled(names: Iterable[str]) -> list[str]:
    """Return the names that occur more than once."""
    return sorted(name for name, times in Counter(names).items() if times > 1)


def doubled_files(modules: Iterable[Module]) -> list[str]:
    """Return the file names that several modules have."""
    names = (module.path.name for module in modules)
    return doubled(name for name in names if name != "__init__.py")


def doubled_classes(modules: Iterable[Module]) -> list[str]:
    """Return the names that several classes have."""
    return doubled(
        node.name
        for module in modules
        for node in module.nodes
        if isinstance(node, ast.ClassDef)
    )


def op_tables(module: Module) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the names and the contents of the tables of op types that a module has."""
    for node in module.tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            types = op_types(node.value)
            if types:
                yield ast.unparse(target), types


def op_types(value: ast.expr) -> frozenset[str]:
    """Return what a table of op types holds; nothing if a key is no op type."""
    if isinstance(value, ast.Call) and len(value.args) == 1:
        value = value.args[0]
    if isinstance(value, ast.Dict):
        keys: list[ast.expr | None] = value.keys
        held = [f"={ast.unparse(v)}" for v in value.values]
    elif isinstance(value, ast.Set | ast.Tuple | ast.List):
        keys = [*value.elts]
        held = [""] * len(keys)
    else:
        return frozenset()
    types = [k.value if isinstance(k, ast.Constant) else None for k in keys]
    are_types = (isinstance(t, str) and OP_TYPE.fullmatch(t) for t in types)
    if not all(are_types):
        return frozenset()
    return frozenset(f"{t}{v}" for t, v in zip(types, held, strict=True))


def doubled_tables(modules: Iterable[Module]) -> list[str]:
    """Return the sets of op types that are tables in several modules."""
    homes: dict[frozenset[str], dict[str, str]] = defaultdict(dict)
    for module in modules:
        for name, types in op_tables(module):
            homes[types][module.name] = name
    return [
        f"{' '.join(sorted(types))}: {', '.join(map('.'.join, places.items()))}"
        for types, places in homes.items()
        if len(places) > 1
    ]


def long_functions(module: Module) -> Iterator[tuple[ast.FunctionDef, bool]]:
    """Yield the long functions, and whether a comment is in them."""
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef):
            lines = lines_of(node)
            if len(lines & module.code_lines) > LONG:
                yield node, bool(lines & module.comment_lines)


def branching_functions(module: Module) -> Iterator[tuple[ast.AST, bool]]:
    """Yield the long functions that branch, and whether a comment is in them."""
    branches = (ast.If, ast.IfExp, ast.Match, ast.Try)
    for node, has_comment in long_functions(module):
        if any(isinstance(inner, branches) for inner in ast.walk(node)):
            yield node, has_comment


def unexplained(modules: Iterable[Module]) -> list[str]:
    """Return the long functions that have neither a docstring nor a comment."""
    return [
        f"{module.path.as_posix()}:{node.lineno} {node.name}"
        for module in modules
        for node, has_comment in long_functions(module)
        if not has_comment and ast.get_docstring(node) is None
    ]


def riddles(modules: Iterable[Module]) -> list[str]:
    """Return the modules whose docstring begins with a question word."""
    return [
        module.name
        for module in modules
        if re.match("(What|Which)", ast.get_docstring(module.tree) or "")
    ]


def imported_once(modules: Collection[Module]) -> list[str]:
    """Return the modules that one module imports, with that one."""
    graph = import_graph(modules)
    files = [m.name for m in modules if m.path.name != "__init__.py"]
    homes = [[*graph.predecessors(name)] if name in graph else [] for name in files]
    return [
        f"{name} (by {importers[0]})"
        for name, importers in zip(files, homes, strict=True)
        if len(importers) == 1
    ]


def worklists(modules: Iterable[Module]) -> list[str]:
    """Return the places of loops that take entries from a list until it is empty."""
    return [
        f"{module.path.as_posix()}:{node.lineno} {node.test.id}"
        for module in modules
        for node in module.nodes
        if isinstance(node, ast.While) and isinstance(node.test, ast.Name)
        if any(takes_from(inner, node.test.id) for inner in ast.walk(node))
    ]


def takes_from(node: ast.AST, name: str) -> bool:
    """Tell whether a node takes an entry out of the list of a name."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("pop", "popleft", "popitem")
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == name
    )


def bare_numbers(modules: Iterable[Module]) -> list[str]:
    """Return the numbers that modules name and whose origin no line tells.

    An origin is a comment on the lines of the number or the line above, or a string
    below it. Numbers that are computed from other names are derived.
    """
    found = []
    for module in modules:
        body = module.tree.body
        for node, below in zip_longest(body, body[1:]):
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            told = {node.lineno - 1, *lines_of(node)} & module.comment_lines
            if is_number(node.value) and not told and not (below and is_text(below)):
                found.append(f"{module.path.as_posix()}:{node.lineno}")
    return found


def is_number(value: ast.expr) -> bool:
    """Tell whether an expression is made of numbers alone."""
    parts = [n for n in ast.walk(value) if isinstance(n, ast.Constant | ast.Name)]
    return bool(parts) and all(
        isinstance(n, ast.Constant) and type(n.value) in (int, float) for n in parts
    )


def unused(modules: Iterable[Module]) -> list[str]:
    """Return private constants, functions and classes that no module but facades names.

    A function with a decorator is registered by it.
    """
    found = []
    for module in modules:
        if module.path.name == "__init__.py":
            continue
        words = Counter(re.findall(r"\w+", module.source))
        for node in module.tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                target = (
                    node.targets[0] if isinstance(node, ast.Assign) else node.target
                )
                name = target.id if isinstance(target, ast.Name) else ""
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                name = "" if node.decorator_list else node.name
            else:
                continue
            if re.match("_[^_]", name) and words[name] == 1:
                found.append(f"{module.name}.{name}")
    return found


def words_what(modules: Iterable[Module]) -> str:
    """Return how often docstrings say "what", in 1,000 words."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [
        ast.get_docstring(node) or ""
        for module in modules
        for node in module.nodes
        if isinstance(node, kinds)
    ]
    words = [w.lower() for text in texts for w in re.findall(r"[A-Za-z']+", text)]
    return f"{1000 * words.count('what') / max(len(words), 1):.1f}"


def internal_tests(root: Path, modules: Iterable[Module]) -> tuple[list[str], int]:
    """Return the files of tests that import internals, and the number of all files.

    Internals are the modules of rooms; a room's facade and the modules beside the
    rooms are public.
    """
    internals = {
        m.name
        for m in modules
        if m.path.name != "__init__.py" and m.name.count(".") > 1
    }
    files = sorted((root / "tests").rglob("test_*.py"))
    found = []
    for path in files:
        names = [*imported_names(ast.walk(ast.parse(path.read_text())))]
        homes = {name.rpartition(".")[0] for name in names}
        if not internals.isdisjoint(homes | {*names}):
            found.append(path.relative_to(root).as_posix())
    return found, len(files)


def unmapped(modules: Iterable[Module], text: str) -> list[str]:
    """Return the modules that no line of the map names, packages apart."""
    named = set(re.findall(r"`([\w./]+)`", text))
    return [
        module.name
        for module in modules
        if module.path.name != "__init__.py"
        and named.isdisjoint(
            {
                module.name,
                module.name.partition(".")[2],
                module.path.as_posix(),
                module.path.relative_to(PACKAGE).as_posix(),
            }
        )
    ]


def files_entered(call: Callable[[], object]) -> int:
    """Return how many files of the package a call enters, imports apart."""
    entered = set()
    place = f"{ROOT / PACKAGE}/"

    def look(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "<module>":
            entered.add(code.co_filename)

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sum(name.startswith(place) for name in entered)


def examples() -> Mapping[str, Callable[[], Callable[[], object]]]:
    """Return what prepares each call, and then returns it."""
    import tensorflow as tf

    import geutil as ge
    from geutil import model
    from geutil.batchnorm import fold_batch_norms
    from geutil.gradients import gradients
    from geutil.quantize import quantize

    def small_network() -> Any:
        image = tf.keras.Input([8, 8, 3], name="image")
        x = tf.keras.layers.Conv2D(4, 3, use_bias=False)(image)
        x = tf.keras.layers.BatchNormalization()(x)
        return tf.keras.Model(image, tf.keras.layers.ReLU()(x))

    def copy() -> Callable[[], object]:
        with tf.Graph().as_default():
            x = tf.constant(1.0, name="x")
            y = tf.negative(x, name="y")
        return lambda: ge.copy([x.op, y.op], dst_scope="copy")

    def fold() -> Callable[[], object]:
        opened = model.open(small_network())
        return lambda: fold_batch_norms(opened)

    def speed() -> Callable[[], object]:
        weights = [tf.Variable(tf.ones([4, 4])) for _ in range(8)]

        @tf.function(input_signature=[tf.TensorSpec([8, 4])])
        def step(x: Any) -> object:
            for weight in weights:
                x = tf.tanh(tf.matmul(x, weight))
            return gradients(x, weights, checkpoints="speed")

        return step.get_concrete_function

    def open_keras() -> Callable[[], object]:
        network = small_network()
        return lambda: model.open(network)

    def simulate() -> Callable[[], object]:
        opened = model.open(small_network())
        fold_batch_norms(opened)
        return lambda: quantize(opened, is_training=False)

    return {
        "copy": copy,
        "fold": fold,
        "gradients": speed,
        "open": open_keras,
        "quantize": simulate,
    }


def count_entered() -> str:
    """Return the numbers of files that the examples enter."""
    counts = []
    for prepare in examples().values():
        # The first call imports, and fills what is kept for later ones.
        prepare()()
        counts.append(files_entered(prepare()))
    return " / ".join(map(str, counts))


@dataclass(frozen=True)
class Row:
    """A row of the table: what is counted, how it stands, what is wanted, and where."""

    title: str
    value: str
    wanted: str
    found: Collection[str] = ()
    peers: tuple[str, ...] = ()


def share(part: int, whole: int) -> str:
    """Return a part as percent of a whole."""
    return f"{100 * part / whole:.1f} %" if whole else "none"


def counted(title: str, found: Collection[str], wanted: str) -> Row:
    """Return the row of a list of faults."""
    return Row(title, str(len(found)), wanted, found)


def measure_any(modules: Collection[Module]) -> list[Row]:
    """Return the rows that have a meaning for any package."""
    code = sum(len(m.code_lines) for m in modules)
    lines = sum(m.source.count("\n") for m in modules)
    imports = sum(len(m.import_lines) for m in modules)
    comments = sum(len(m.comment_lines) for m in modules)
    long = [has for m in modules for _, has in branching_functions(m)]
    circles = import_circles(modules)
    sizes = " + ".join(str(len(circle)) for circle in circles)
    return [
        Row("files", str(len(modules)), "at most 250"),
        Row("code lines; all lines", f"{code:,}; {lines:,}", "47,000; 72,000"),
        Row(
            "import circles (modules in them)",
            f"{len(circles)} ({sizes or 0})",
            "0",
            [" ".join(circle) for circle in circles],
        ),
        Row("import lines / code lines", share(imports, code), "under 7 %"),
        Row("comments / code lines", share(comments, code), "5 %"),
        Row(
            f"branching functions above {LONG} lines with a comment",
            f"{share(sum(long), len(long))} of {len(long)}",
            "each that needs one",
        ),
        counted(
            f"functions above {LONG} lines without docstring or comment",
            unexplained(modules),
            "0",
        ),
        Row('"what" in 1,000 words of docstrings', words_what(modules), "at most 1"),
        counted("file names used twice", doubled_files(modules), "at most 10"),
        counted("class names used twice", doubled_classes(modules), "at most 5"),
        counted("modules that one module imports", imported_once(modules), "40"),
        counted("worklists written by hand", worklists(modules), "20"),
        counted("numbers without an origin", bare_numbers(modules), "0"),
        counted("private names without a use", unused(modules), "0"),
    ]


def measure(root: Path) -> list[Row]:
    """Return the rows that are read from the source of a tree."""
    modules = read_modules(root)
    private = [m.name for m in modules if private_imports(m.nodes)]
    place = root / MAP
    missing = unmapped(modules, place.read_text() if place.exists() else "")
    inside, tests = internal_tests(root, modules)
    return [
        *measure_any(modules),
        counted("modules that import private names", private, "1"),
        counted("tables of op types doubled", doubled_tables(modules), "0"),
        counted('docstring titles "What", "Which"', riddles(modules), "0"),
        counted("modules not in the map", missing, "0"),
        Row(
            "tests that import internals",
            f"{len(inside)} of {tests}",
            "60 of 350",
            inside,
        ),
    ]


def with_peers(rows: Iterable[Row], peers: Collection[str]) -> list[Row]:
    """Return rows with the values of installed packages beside them."""
    values: dict[str, list[str]] = defaultdict(list)
    for peer in peers:
        spec = importlib.util.find_spec(peer)
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit(f"{peer} is not installed as a package")
        root = Path(spec.submodule_search_locations[0]).parent
        for row in measure_any(read_modules(root, peer)):
            values[row.title].append(row.value)
    return [replace(row, peers=tuple(values[row.title])) for row in rows]


ENTERED = "files entered: copy / fold / gradients / open / quantize"
ENTERED_WANTED = "14 / 24 / 26 / 18 / 22"


TIMES = Path("tests", "times.tsv")
TEST_LIMITS = {"file": 20.0, "test": 5.0}
"""How many seconds a file of tests, and one test, may take."""


def measure_tests(root: Path) -> list[Row]:
    """Return the rows that are read from the times that `make test-times` wrote."""
    place = root / TIMES
    lines = place.read_text(encoding="utf-8").splitlines() if place.exists() else []
    cells = [line.split("\t") for line in lines]
    rows = []
    for kind, most in TEST_LIMITS.items():
        slow = [
            f"{s} s  {name}" for k, name, s in cells if k == kind and float(s) > most
        ]
        title = f"slow tests: a {kind} above {most:.0f} s"
        rows.append(Row(title, str(len(slow)) if lines else "not measured", "0", slow))
    return rows


def render(rows: Collection[Row], whole: bool, peers: Collection[str] = ()) -> str:
    """Return the table as text, with the places that it counts if asked for."""
    cells: list[tuple[str, ...]] = [("", "today", "wanted", *peers)]
    cells += [
        (r.title, r.value, r.wanted, *(r.peers or ("",) * len(peers))) for r in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    ]
    for row in rows:
        if whole and row.found:
            lines += ["", f"{row.title}:", *(f"  {entry}" for entry in row.found)]
    return "\n".join(line.rstrip() for line in lines)


def main(arguments: list[str] | None = None) -> None:
    """Print the table of the tree that this file is in."""
    parser = argparse.ArgumentParser(prog="make house", description=__doc__)
    parser.add_argument("--fast", action="store_true", help="without TensorFlow")
    parser.add_argument("--list", action="store_true", help="list what was found")
    parser.add_argument("--peers", nargs="+", default=[], help="installed packages")
    options = parser.parse_args(arguments)
    rows = [*measure(ROOT), *measure_tests(ROOT)]
    if not options.fast:
        rows.insert(1, Row(ENTERED, count_entered(), ENTERED_WANTED))
    rows = with_peers(rows, options.peers)
    print(render(rows, options.list, options.peers))


if __name__ == "__main__":
    main()
