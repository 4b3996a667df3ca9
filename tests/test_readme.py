"""The code that the README shows runs, and the names it gives exist."""

import re
from pathlib import Path

import geutil as ge

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_every_python_block_runs():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_every_name_in_the_table_exists():
    rows = re.findall(
        r"^\| \w[\w ]* \| `geutil\.\w+` \| (.*) \|$", README, re.MULTILINE
    )
    assert len(rows) == 4
    for row in rows:
        for name in re.findall(r"`(\w+)`", row):
            assert hasattr(ge, name), name
