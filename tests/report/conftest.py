"""Pages of the tests, and the browser that opens them."""

import os
import shutil
from pathlib import Path

import pytest

from geutil import report
from tests import thorough
from tests.report import samples
from tests.report.browsing import SIZE, Opened

EXECUTABLE = "GEUTIL_CHROMIUM"
"""The environment variable that names another Chromium."""
SCREENSHOTS = Path(__file__).resolve().parents[2] / "build" / "screenshots"
ARGUMENTS = [
    # Tests run as root in containers, where Chromium refuses its sandbox.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def folded():
    return samples.folded()


@pytest.fixture(scope="session")
def quantized():
    return samples.quantized()


@pytest.fixture(scope="session")
def flow():
    return samples.flow()


@pytest.fixture(scope="session")
def steps():
    return samples.steps()


@pytest.fixture(scope="session")
def chromium():
    """Return a browser; without one, skip the test, or fail it where CI runs."""
    missing = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
    places = (shutil.which(name) for name in ("chromium", "chromium-browser"))
    found = os.environ.get(EXECUTABLE) or next(filter(None, places), None)
    if not found:
        missing(
            "needs Chromium: install your system's package (on Debian, 'apt-get "
            f"install chromium'), or set {EXECUTABLE} to a Chromium or Chrome"
        )
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("needs playwright: pip install 'geutil[test]'")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def tabs(chromium):
    """Return a list of tabs of a browser that is offline, and what opens another."""
    context = chromium.new_context(viewport=SIZE)
    context.set_offline(True)
    context.set_default_timeout(300_000)
    yield [], context.new_page
    context.close()


@pytest.fixture
def browse(tabs, tmp_path):
    """Return what opens a page from a file, offline; errors in it fail the test.

    A tab is used again, which is faster than a new one.
    """
    idle, new_tab = tabs
    opened = []

    def open_page(page: report.Page, link: str = "") -> Opened:
        path = page.save(tmp_path / f"page{len(opened)}.html")
        opened.append(Opened(idle.pop() if idle else new_tab(), path, link))
        return opened[-1]

    yield open_page
    for page in opened:
        page.close()
        idle.append(page.page)
    for page in opened:
        assert page.complaints == []


@pytest.fixture
def keep():
    """Return what keeps a screenshot of a page, for people: not by `make test`."""

    def screenshot(opened: Opened, name: str) -> None:
        if thorough.is_quick():
            return
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        opened.page.screenshot(path=path)
        assert path.stat().st_size > 10_000

    return screenshot


@pytest.fixture
def nested(browse):
    return browse(report.view(samples.nested(), title="Some scopes"))


@pytest.fixture
def compared(browse):
    page = report.diff(samples.nested(), samples.without_tanh(), title="An op swapped")
    return browse(page)


@pytest.fixture
def fold(browse, folded):
    return browse(report.diff(folded.before, folded.after, report=folded.report))
