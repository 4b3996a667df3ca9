"""The pages are in the field's words: subject, verb and object, and no riddles."""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documentation.pages import DOCS
from tests.documentation.test_site import PACKAGES

WRITTEN = {"zoo.md": "\n## "}
"""Pages that a tool writes, and the mark behind which it quotes messages."""

FENCES = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`]*`|\bgeutil\.[\w.]+")
OPENING = re.compile(r"(?:^|[.:!?|] )[-*#>\d. ]*((?:What|Which|Whether)\b[^.|]*)")
WORDS = {
    "capabilities": r"\bpowers?\b",
    "batch norms": r"(?<!batch )(?<!layer )\bnorms\b",
    "is reported": r"\b(?:is|are|was|were|be|been) told\b",
    "corresponds to": r"\bst(?:ands?|ood|anding) for\b",
}
"""The words of the field, and the ones that pages used in their place."""

SHARE = 1 / 1000
"""The largest share of "what" among the words of all pages (HOUSE.md, "Language")."""


def blocks(text: str) -> list[str]:
    """Return the paragraphs, cells and items of a page, without code, a line each."""
    prose = CODE.sub("x", FENCES.sub("", text))
    parts = re.split(r"\n\s*\n|\n(?=[-*#|]|\d+\. )", prose)
    return [" ".join(part.split()) for part in parts]


def pages() -> dict[str, list[str]]:
    """Return the blocks of each page, and of the README."""
    root = Path(DOCS)
    paths = [*sorted(root.rglob("*.md")), root.parent / "README.md"]
    texts = {
        str(path.relative_to(root.parent)): path.read_text("utf-8") for path in paths
    }
    for name, mark in WRITTEN.items():
        texts[f"docs/{name}"] = texts[f"docs/{name}"].partition(mark)[0]
    return {name: blocks(text) for name, text in texts.items()}


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield the docstrings that the reference shows, with the names of their owners."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            public = getattr(module, name)
            if not inspect.isclass(public):
                members = {name: public}
            else:
                members = {name: public, **vars(public)}
            for own, member in members.items():
                routine = getattr(member, "fget", None) or member
                is_shown = inspect.isroutine(routine) or inspect.isclass(routine)
                if is_shown and not own.startswith("_") and routine.__doc__:
                    yield f"{package}.{name}.{own}", routine.__doc__


def faults(block: str) -> list[str]:
    """Return the openings and words of a block that pages do not use."""
    found = [f"begins with '{match}'" for match in OPENING.findall(block)]
    for better, regex in WORDS.items():
        matches = re.findall(regex, block, re.IGNORECASE)
        found += [f"'{word}', not '{better}'" for word in matches]
    return found


def test_sentences_have_subjects_and_words_are_the_fields():
    wrong = {
        (name, fault)
        for name, parts in pages().items()
        for part in parts
        for fault in faults(part)
    }
    assert sorted(wrong) == []


def test_what_is_rare():
    words = [
        word.lower()
        for parts in pages().values()
        for part in parts
        for word in re.findall(r"[A-Za-z']+", part)
    ]
    assert len(words) > 30_000
    assert words.count("what") <= SHARE * len(words)


def test_docstrings_of_the_reference_have_subjects_and_few_whats():
    shown = {text: name for name, text in docstrings()}
    wrong = {
        (name, opening)
        for text, name in shown.items()
        for block in blocks(text)
        for opening in OPENING.findall(block)
    }
    assert sorted(wrong) == []
    words = re.findall(r"[a-z']+", " ".join(shown).lower())
    assert len(words) > 40_000
    assert words.count("what") <= SHARE * len(words)


@pytest.mark.parametrize(
    "text",
    [
        "What shows another tensor's buffer takes nothing.",
        "It folds. Which way is told below.",
        "| model | Whether it folds |",
        "- What is refused",
        "The op has powers.",
        "It folds all\nnorms.",
        "A width stands for the batch.",
    ],
)
def test_a_riddle_is_found(text):
    assert any(map(faults, blocks(text)))


def test_code_and_the_fields_own_norms_pass():
    text = (
        "`powers` reads it; batch\nnorms, layer norms, `norms`.\n\n```text\nWhat\n```"
    )
    assert not any(map(faults, blocks(text)))
