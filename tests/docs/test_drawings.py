"""The drawings of the concepts: each is shown, described, and readable anywhere."""

import re
from pathlib import Path
from xml.etree import ElementTree

DOCS = Path(__file__).parents[2] / "docs"
DRAWINGS = sorted((DOCS / "images" / "concepts").glob("*.svg"))
CONCEPTS = sorted((DOCS / "concepts").glob("*.md"))
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")
SVG = "{http://www.w3.org/2000/svg}"


def images(page: Path) -> list[tuple[str, Path]]:
    """Return the description and the file of each image of a page."""
    found = IMAGE.findall(page.read_text(encoding="utf-8"))
    return [(text, (page.parent / target).resolve()) for text, target in found]


def test_pages_have_drawings_with_descriptions():
    shown = {page.stem: images(page) for page in CONCEPTS}
    assert {stem for stem, found in shown.items() if not 1 <= len(found) <= 2} == set()
    texts = [text for found in shown.values() for text, _ in found]
    assert [text for text in texts if len(text) <= 40] == []
    # Each drawing is shown once.
    assert sorted(path for found in shown.values() for _, path in found) == DRAWINGS


def test_drawings_stand_alone_on_white():
    for path in DRAWINGS:
        root = ElementTree.parse(path).getroot()
        assert root.tag == f"{SVG}svg"
        assert root.find(f"{SVG}title").text
        back = root.find(f"{SVG}rect")
        assert back.attrib["fill"] == "#ffffff", path
        size = (back.attrib["width"], back.attrib["height"])
        assert size == (root.attrib["width"], root.attrib["height"]), path
        text = path.read_text(encoding="utf-8")
        assert "http" not in text.replace(SVG.strip("{}"), ""), path
        assert path.stat().st_size < 8_000, path
        # What is drawn is within the drawing.
        width, height = map(float, size)
        for element in root.iter():
            if element.tag in (f"{SVG}rect", f"{SVG}text") and "x" in element.attrib:
                x, y = float(element.attrib["x"]), float(element.attrib["y"])
                assert 0 <= x <= width and 0 <= y <= height, path
                assert x + float(element.attrib.get("width", 0)) <= width, path
                assert y + float(element.attrib.get("height", 0)) <= height, path
