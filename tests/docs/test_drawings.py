"""The drawings of the concepts: each is shown, described, and readable anywhere."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parents[2] / "docs"
DRAWINGS = sorted((DOCS / "images" / "concepts").glob("*.svg"))
CONCEPTS = sorted((DOCS / "concepts").glob("*.md"))
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")
SVG = "{http://www.w3.org/2000/svg}"


def images(page: Path) -> list[tuple[str, Path]]:
    """Return the description and the file of each image of a page."""
    found = IMAGE.findall(page.read_text(encoding="utf-8"))
    return [(text, (page.parent / target).resolve()) for text, target in found]


def stems(paths: list[Path]) -> list[str]:
    return [path.stem for path in paths]


@pytest.mark.parametrize("page", CONCEPTS, ids=stems(CONCEPTS))
def test_pages_have_drawings_with_descriptions(page):
    shown = images(page)
    assert 1 <= len(shown) <= 2
    for text, path in shown:
        assert len(text) > 40
        assert path in DRAWINGS


def test_each_drawing_is_shown_once():
    shown = [path for page in CONCEPTS for _, path in images(page)]
    assert sorted(shown) == DRAWINGS


@pytest.mark.parametrize("path", DRAWINGS, ids=stems(DRAWINGS))
def test_drawing_stands_alone_on_white(path):
    root = ElementTree.parse(path).getroot()
    assert root.tag == f"{SVG}svg"
    assert root.find(f"{SVG}title").text
    back = root.find(f"{SVG}rect")
    assert back.attrib["fill"] == "#ffffff"
    size = (back.attrib["width"], back.attrib["height"])
    assert size == (root.attrib["width"], root.attrib["height"])
    text = path.read_text(encoding="utf-8")
    assert "http" not in text.replace(SVG.strip("{}"), "")
    assert path.stat().st_size < 8_000


@pytest.mark.parametrize("path", DRAWINGS, ids=stems(DRAWINGS))
def test_what_is_drawn_is_within_the_drawing(path):
    root = ElementTree.parse(path).getroot()
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for element in root.iter():
        if element.tag in (f"{SVG}rect", f"{SVG}text") and "x" in element.attrib:
            x, y = float(element.attrib["x"]), float(element.attrib["y"])
            assert 0 <= x <= width and 0 <= y <= height
            assert x + float(element.attrib.get("width", 0)) <= width
            assert y + float(element.attrib.get("height", 0)) <= height
