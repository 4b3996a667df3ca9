"""A plugin of pytest that says where the time of a run goes.

At the end of each run it prints the seconds and the processor time of the whole, and
the ten slowest files. With `--times` it writes the seconds of each file, each test
above a tenth of a second, and each fixture, set-up included, into
`tests/times.tsv`, and the slowest files into CONTRIBUTING.md; `make house` reads them.
"""

import collections
import resource
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

TABLE = Path("tests", "times.tsv")
GUIDE = Path("CONTRIBUTING.md")
"""Where they are in the tree whose tests run."""
BEGIN, END = "<!-- slowest files -->\n", "<!-- end of slowest files -->\n"
SLOWEST = 50
LEAST = 0.1
"""Tests and fixtures of fewer seconds have no row."""
_Seconds = collections.Counter[str]


def processor_seconds() -> float:
    """Return the processor time of this process and of all below it that ended.

    Workers have ended when the controller asks, with the servers that they forked from.
    """
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


class Times:
    """The seconds of files, tests and fixtures, of all workers."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.begin = time.perf_counter()
        self.files: _Seconds = collections.Counter()
        self.tests: _Seconds = collections.Counter()
        self.fixtures: _Seconds = collections.Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        """Count what a fixture takes, with the fixtures that it is the first to ask."""
        begin = time.perf_counter()
        try:
            return (yield)
        finally:
            name = f"{fixturedef.baseid}::{fixturedef.argname}"
            self.fixtures[name] += time.perf_counter() - begin

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.files[report.nodeid.partition("::")[0]] += report.duration
        self.tests[report.nodeid] += report.duration

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Give the controller what it does not see of a worker."""
        output = getattr(self.config, "workeroutput", None)
        if output is not None:
            output["fixtures"] = dict(self.fixtures)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output: Mapping[str, Any] = getattr(node, "workeroutput", {})
        self.fixtures.update(output.get("fixtures", {}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        wall = time.perf_counter() - self.begin
        used = processor_seconds()
        terminalreporter.section("times")
        terminalreporter.write_line(
            f"{wall:.0f} s, {used / 60:.1f} min of processor time; slowest files:"
        )
        for name, seconds in self.files.most_common(10):
            terminalreporter.write_line(f"{seconds:8.1f} s  {name}")
        if self.config.getoption("times"):
            self.write(wall, used)

    def write(self, wall: float, used: float) -> None:
        """Write the table, and its slowest files into the guide."""
        rows = [("run", "wall", wall), ("run", "processor", used)]
        rows += [("file", *row) for row in self.files.most_common()]
        for kind, counted in (("test", self.tests), ("fixture", self.fixtures)):
            rows += [(kind, *row) for row in counted.most_common() if row[1] >= LEAST]
        lines = [f"{kind}\t{name}\t{seconds:.2f}" for kind, name, seconds in rows]
        root = self.config.rootpath
        (root / TABLE).write_text("\n".join(lines) + "\n", encoding="utf-8")
        whole = sum(self.files.values())
        shares = [
            f"| `{name}` | {seconds:.1f} | {100 * seconds / whole:.1f} % |"
            for name, seconds in self.files.most_common(SLOWEST)
        ]
        text = (root / GUIDE).read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        head = "| file | seconds | share |\n|---|---|---|\n"
        table = f"{head}{chr(10).join(shares)}\n"
        text = f"{before}{BEGIN}\n{table}\n{END}{after}"
        (root / GUIDE).write_text(text, encoding="utf-8")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", action="store_true", help="write tests/times.tsv")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Times(config))
