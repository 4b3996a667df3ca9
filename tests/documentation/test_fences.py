"""Every block on a page is one that is run, or of a kind that is only shown."""

from pathlib import Path

import pytest
from sybil.document import Document

from tests.documentation.fences import INSTALLS, RUN, SHOWN, fences
from tests.documentation.pages import DOCS, pages
from tests.documentation.shell import sessions

PAGES = sorted(Path(DOCS).rglob("*.md"))


def test_blocks_are_run_or_of_a_kind_that_is_only_shown():
    wrong = []
    for page in PAGES:
        listed = list(fences(page.read_text(encoding="utf-8")))
        # A block with a title, for example, is not found.
        found = {example.line for example in pages().parse(page).examples()}
        for fence in listed:
            known = fence.language in (*RUN, *SHOWN)
            is_run = fence.language not in RUN or fence.line in found
            is_bash = fence.language == "bash"
            installs = not is_bash or all(map(INSTALLS.match, fence.lines))
            if not (known and is_run and installs):
                wrong.append((page.name, fence))
    assert len(PAGES) > 40
    assert wrong == []


def _run(tmp_path, text):
    """Run a page, and return how many blocks there were."""
    page = tmp_path / "page.md"
    page.write_text(text)
    sybil = pages()
    document = Document.parse(str(page), *sybil.parsers)
    sybil.setup(document.namespace)
    try:
        examples = list(document.examples())
        for example in examples:
            example.evaluate()
        return len(examples)
    finally:
        sybil.teardown(document.namespace)


def _page(*blocks):
    return "\n".join(f"```{language}\n{text}\n```\n" for language, text in blocks)


def test_a_page_runs_in_one_namespace(tmp_path):
    assert _run(tmp_path, _page(("python", "a = 1"), ("python", "assert a == 1"))) == 2


def test_a_wrong_output_is_found(tmp_path):
    text = _page(("python", "print(2)"), ("text", "3"))
    with pytest.raises(AssertionError, match="something else"):
        _run(tmp_path, text)


def test_what_is_left_out_of_an_output_may_be_anything(tmp_path):
    assert _run(tmp_path, _page(("python", "print(2, 3, 4)"), ("text", "2 ... 4"))) == 2


def test_text_that_is_no_output_is_left_alone(tmp_path):
    text = _page(("text", "a drawing"), ("python", "print(2)"), ("text title='x'", "y"))
    assert _run(tmp_path, text) == 2


def test_a_page_runs_in_a_folder_of_its_own(tmp_path):
    block = "import os\nassert os.listdir() == []\nopen('file', 'w').close()"
    for _ in range(2):
        assert _run(tmp_path, _page(("python", block))) == 1


def test_lines_run_and_are_compared(tmp_path):
    assert _run(tmp_path, _page(("console", "$ geutil --version | cut -c 1\n0"))) == 1
    with pytest.raises(AssertionError, match="something else"):
        _run(tmp_path, _page(("console", "$ geutil --version\nnothing")))


def test_a_line_that_fails_is_found_unless_its_code_is_shown(tmp_path):
    line = "$ geutil ops nowhere"
    with pytest.raises(AssertionError, match="exits with 1"):
        _run(tmp_path, _page(("console", line)))
    assert _run(tmp_path, _page(("console", f"{line}\n$ echo $?\n1"))) == 1
    with pytest.raises(AssertionError, match="something else"):
        _run(tmp_path, _page(("console", f"{line}\n$ echo $?\n0")))


def test_a_line_can_go_on_in_the_next_one():
    block = "$ geutil a \\\n    b\nprinted\n$ c"
    assert sessions(block) == [("geutil a \\\n    b", "printed\n"), ("c", "")]
