"""Each of a newcomer's jobs is two clicks from the start page, on a page that runs."""

import re
from pathlib import Path

from tests.documentation.fences import RUN, fences
from tests.documentation.pages import DOCS, pages

START = Path(DOCS) / "index.md"
JOBS = Path(DOCS) / "jobs.md"
LINK = re.compile(r"\]\(([\w./-]+\.md)(?:#([\w-]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCES = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[tuple[Path, str]]:
    """Return the pages that a page links to, and the headings there."""
    found = LINK.findall(page.read_text(encoding="utf-8"))
    return [((page.parent / target).resolve(), anchor) for target, anchor in found]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as the site makes them."""
    headings = HEADING.findall(FENCES.sub("", page.read_text(encoding="utf-8")))
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


def jobs() -> list[tuple[Path, str]]:
    """Return the pages of the jobs, and the headings there."""
    table = re.findall(r"^\| \d+ \| .* \| (.*) \|$", JOBS.read_text(), re.MULTILINE)
    assert len(table) == 15
    found = [LINK.search(cell) for cell in table]
    return [((JOBS.parent / match[1]).resolve(), match[2] or "") for match in found]


def test_each_job_is_two_clicks_from_the_start_page():
    one = {page for page, _ in links(START)}
    # The list of jobs is no road: a newcomer finds the page by its own name.
    two = one.union(*({page for page, _ in links(page)} for page in one - {JOBS}))
    assert JOBS in one
    assert [page for page, _ in jobs() if page not in two] == []


def test_each_job_leads_to_a_heading_on_a_page_that_runs():
    for page, anchor in jobs():
        assert not anchor or anchor in anchors(page), (page.name, anchor)
        found = {example.line for example in pages().parse(page).examples()}
        blocks = fences(page.read_text(encoding="utf-8"))
        run = [block for block in blocks if block.language in RUN]
        assert len(run) >= 2, page.name
        assert {block.line for block in run} <= found, page.name


def test_all_links_of_the_start_page_lead_somewhere():
    for page, anchor in [*links(START), *links(JOBS)]:
        assert page.is_file(), page
        assert not anchor or anchor in anchors(page), (page.name, anchor)
