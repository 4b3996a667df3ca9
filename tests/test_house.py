"""The table of `make house` counts what is there."""

import re
import sys

import pytest

from tests.processes import ROOT
from tools import house

LONG = "\n".join(f"    x{i} = {i}" for i in range(20))
TREE = {
    "geutil/__init__.py": '"""The package."""\n',
    # A circle of a deferred import and one for types.
    "geutil/a.py": '"""What it is."""\n\ndef f():\n    from geutil.b import g\n',
    "geutil/b.py": "if typing.TYPE_CHECKING:\n    import geutil.a\n",
    "geutil/c/__init__.py": "from geutil.c.b import Thing\n",
    # Imports from its package, which imports it.
    "geutil/c/b.py": "from geutil.c import other\nclass Thing: ...\n",
    "geutil/c/d.py": "from tensorflow.python.ops import x\nclass Thing: ...\n",
    "geutil/c/e.py": "from tensorflow import python\nimport tensorflow.pythonic\n",
    "geutil/f.py": '_SUMS = frozenset(("AddV2", "Add"))\nSLOT = {"Add": 0}',
    "geutil/g.py": '_ADDS: Any = {"Add", "AddV2"}\nSLOT = {"Add": 1}',
    "geutil/h.py": f"def f():\n    # Why.\n    if 1:\n        y = 1\n{LONG}\n",
    "geutil/i.py": f'def f():\n    "Title."\n    if 1:\n        y = 1\n{LONG}\n',
    "geutil/j.py": f"def f():\n{LONG}\n",
    "geutil/k.py": "A = 1\n# Why.\nB = -2.5\nC = 3\n'Size.'\nD = 2 * A\nE = (1, 2)",
    "geutil/l.py": "while left:\n    left.pop()\nwhile left:\n    f(left.pop)\n",
    "geutil/m.py": "_A = {}\n_B = {}\n_B\n@f\ndef _c(): ...\nclass _D: ...\n",
    "geutil/tests/a.py": "A = 1\n",
    "tests/test_a.py": "from geutil.c.b import Thing\nfrom geutil import a\n",
    "tests/c/test_b.py": "from geutil.c import Thing\nimport geutil.a\n",
    "docs/architecture.md": "| `a` | `b.py` |\n| `geutil/c/b.py` | `c.d` |\n",
}


@pytest.fixture
def rows(tmp_path):
    """Return the rows of a made-up tree by their titles."""
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return {row.title: row for row in house.measure(tmp_path)}


FOUND = {
    "import circles (modules in them)": ["geutil.a geutil.b", "geutil.c geutil.c.b"],
    "modules that import private names": ["geutil.c.d", "geutil.c.e"],
    "file names used twice": ["b.py"],
    "class names used twice": ["Thing"],
    "tables of op types doubled": ["Add AddV2: geutil.f._SUMS, geutil.g._ADDS"],
    # Not those of h, with a comment, and of i, with a docstring.
    "functions above 15 lines without docstring or comment": ["geutil/j.py:1 f"],
    'docstring titles "What", "Which"': ["geutil.a"],
    "modules not in the map": [
        *("geutil.c.e", "geutil.f", "geutil.g", "geutil.h", "geutil.i", "geutil.j"),
        *("geutil.k", "geutil.l", "geutil.m"),
    ],
    "modules that one module imports": [
        "geutil.a (by geutil.b)",
        "geutil.b (by geutil.a)",
        "geutil.c.b (by geutil.c)",
    ],
    "worklists written by hand": ["geutil/l.py:1 left"],
    "private names without a use": [
        "geutil.f._SUMS",
        "geutil.g._ADDS",
        "geutil.m._A",
        "geutil.m._D",
    ],
    # Not D, which is derived.
    "numbers without an origin": ["geutil/k.py:1", "geutil/k.py:7"],
    "tests that import internals": ["tests/test_a.py"],
}


def test_it_finds_and_counts_what_is_there(rows):
    assert {title: list(rows[title].found) for title in FOUND} == FOUND
    assert rows["files"].value == "15"
    assert rows["import circles (modules in them)"].value == "2 (2 + 2)"
    assert rows["modules that import private names"].value == "2"
    # One of the two long functions that branch.
    commented = rows["branching functions above 15 lines with a comment"]
    assert commented.value == "50.0 % of 2"
    # 7 lines of imports.
    lines = [2, 2, 1, 2, 2, 2, 2, 2, 23, 23, 21, 5, 4, 6]
    assert rows["import lines / code lines"].value == f"{100 * 7 / sum(lines):.1f} %"
    # One "what" in six words of docstrings.
    assert rows['"what" in 1,000 words of docstrings'].value == f"{1000 / 6:.1f}"
    assert rows["tests that import internals"].value == "1 of 2"


def test_it_finds_slow_tests(tmp_path):
    titles = ["slow tests: a file above 20 s", "slow tests: a test above 5 s"]
    unknown = house.measure_tests(tmp_path)
    assert [row.title for row in unknown] == titles
    assert {row.value for row in unknown} == {"not measured"}
    (tmp_path / house.TIMES).parent.mkdir()
    lines = ["run\twall\t500.00", "file\ta.py\t20.01", "file\tb.py\t20.00"]
    lines += ["test\ta.py::test\t6.00", "test\tb.py::test\t4.00", "fixture\tx\t30.0"]
    (tmp_path / house.TIMES).write_text("\n".join(lines) + "\n")
    found = [list(row.found) for row in house.measure_tests(tmp_path)]
    assert found == [["20.01 s  a.py"], ["6.00 s  a.py::test"]]


def test_it_counts_the_files_that_a_call_enters():
    from geutil import lazy

    def call():
        lazy.provide("job of a test", "module", "function")
        house.doubled([])

    try:
        assert house.files_entered(call) == 1
    finally:
        del lazy._provided["job of a test"]
    assert house.files_entered(lambda: lazy.__name__) == 0
    assert sys.getprofile() is None


def test_it_prints_the_table(rows, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(house, "ROOT", tmp_path)
    house.main(["--fast", "--list"])
    printed = capsys.readouterr().out.splitlines()
    assert "wanted" in printed[0]
    titles = {line.partition("  ")[0] for line in printed}
    assert rows.keys() <= titles
    assert "  geutil/j.py:1 f" in printed


def test_it_measures_peers_that_are_installed():
    rows = house.with_peers(house.measure_any([]), ["typer"])
    files = next(row for row in rows if row.title == "files")
    assert int(files.peers[0]) > 10
    with pytest.raises(SystemExit, match="no_such_peer is not installed"):
        house.with_peers(rows, ["no_such_peer"])


def test_the_map_is_that_of_the_tree():
    modules = house.read_modules(ROOT)
    text = (ROOT / house.MAP).read_text(encoding="utf-8")
    assert house.unmapped(modules, text) == []
    rows = re.findall(r"^\| `([\w.]+)` \| \S", text, re.MULTILINE)
    known = {module.name.partition(".")[2] for module in modules}
    assert [name for name in rows if name not in known] == []
    assert len(rows) == len(set(rows))


def test_the_ways_through_the_map_name_what_there_is():
    modules = house.read_modules(ROOT)
    text = (ROOT / house.MAP).read_text(encoding="utf-8")
    start, end = text.index("## Five ways"), text.index("## Modules")
    known = {tuple(module.name.split(".")) for module in modules}
    ends = {name[i:] for name in known for i in range(len(name))}
    named = re.findall(r"`([a-z_0-9.]+)`", text[start:end])
    assert len(named) > 40
    assert [name for name in named if tuple(name.split(".")) not in ends] == []
