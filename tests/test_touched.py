"""`make test-touched` runs the tests that a change reaches, and no others."""

import pytest

from tests.processes import ROOT
from tools import touched

TREE = {
    "geutil/__init__.py": "from geutil.low import f\n",
    "geutil/low.py": "",
    "geutil/high.py": "from geutil import low\n",
    "geutil/alone.py": "",
    "tests/conftest.py": "",
    "tests/helper.py": "def f():\n    from geutil.high import g\n",
    "tests/test_low.py": "import geutil.low\n",
    "tests/test_high.py": "from tests.helper import x\n",
    "tests/test_alone.py": "from geutil import alone\n",
    "tests/part/conftest.py": "from geutil.high import g\n",
    "tests/part/test_fixtures.py": "",
    "docs/low.md": "```python\nfrom geutil.low import f\n```\n",
    "docs/alone.md": "```python\nfrom geutil import alone, high\n```\n",
    "README.md": "",
}
ALL = {name for name in TREE if touched.is_test(name) or name.startswith("docs/")}
HIGH = {
    *("geutil/high.py", "tests/test_high.py", "tests/part/test_fixtures.py"),
    "docs/alone.md",
}
LOW = {"geutil/__init__.py", "geutil/low.py", "tests/test_low.py", "docs/low.md"}
REACHED = {
    "geutil/low.py": HIGH | LOW,
    "geutil/high.py": HIGH,
    "geutil/alone.py": {"geutil/alone.py", "tests/test_alone.py", "docs/alone.md"},
    "tests/helper.py": {"tests/test_high.py"},
    "tests/part/conftest.py": {"tests/part/test_fixtures.py"},
    "tests/test_low.py": {"tests/test_low.py"},
    "docs/low.md": {"docs/low.md"},
    "README.md": set(),
    "tests/conftest.py": ALL,
    "setup.py": ALL,
}


@pytest.fixture
def tree(tmp_path):
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_change_reaches_what_imports_it(tree):
    found = {path: touched.split([path], tree) for path in REACHED}
    assert {path: set(run) for path, (run, _) in found.items()} == REACHED
    assert all({*run, *left} == ALL for run, left in found.values())
    assert not any({*run} & {*left} for run, left in found.values())


def test_files_that_are_no_modules_have_readers():
    modules = {module.name for module in touched.read_sources()}
    assert {name for names in touched.DATA.values() for name in names} <= modules
    assert all((ROOT / place).exists() for place in touched.DATA)


def test_it_asks_git_for_a_revision_that_there_is():
    with pytest.raises(SystemExit, match="nonsense"):
        touched.changed_files("nonsense")
