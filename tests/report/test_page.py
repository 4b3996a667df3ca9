"""The file that a page is: whole, safe to open, and without a wish for the network."""

import base64
import json
import re
import zlib
from html.parser import HTMLParser

import pytest

from geutil import report
from geutil.errors import ReportError
from geutil.report import page as page_module
from tests.report import samples

NASTY = '</script><img src=x onerror="window.hacked=1"><!--\'&amp;'


class Parts(HTMLParser):
    """What a browser finds in a file."""

    def __init__(self, text):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.texts.append("")

    def handle_data(self, data):
        if self.texts:
            self.texts[-1] += data

    def text_of(self, wanted):
        """Return the text in each element of a kind, and of what is behind it."""
        return [
            text.strip()
            for (tag, _), text in zip(self.tags, self.texts, strict=True)
            if tag == wanted
        ]


@pytest.fixture(scope="module")
def page():
    return report.view(samples.nested(), title="nested")


@pytest.fixture(scope="module")
def nasty():
    return samples.marked_up(NASTY)


def test_a_page_is_saved_as_it_is_and_replaces_nothing(page, tmp_path):
    path = tmp_path / "graph.html"
    path.write_text("mine")
    with pytest.raises(ReportError, match=r"exists; pass overwrite=True"):
        page.save(path)
    assert path.read_text() == "mine"
    # A path may be a str.
    assert page.save(str(path), overwrite=True) == path
    assert path.read_bytes() == page.html.encode("utf-8")
    assert repr(page) == "Page(title='nested')"


def test_the_same_graph_makes_the_same_bytes(page):
    assert report.view(samples.nested(), title="nested").html == page.html


def test_the_parts_of_a_page(page):
    parts = Parts(page.html)
    assert parts.text_of("title") == ["nested"]
    data, script = parts.text_of("script")
    assert json.loads(data) == json.loads(json.dumps(page.payload))
    # The parser ends a script where a browser does: the rest of the page is in place.
    assert script == page_module.read_bundle().script.strip()
    assert page.html.rstrip().endswith("</html>")


def test_nothing_is_loaded_from_elsewhere(page):
    parts = Parts(page.html)
    for tag, attributes in parts.tags:
        for name in ("src", "href", "action", "data", "srcset"):
            assert attributes.get(name, "data:,") == "data:,", (tag, attributes)
    style = "".join(parts.text_of("style"))
    assert not re.search(r"@import|url\(\s*['\"]?\s*(?!data:)", style)
    (policy,) = (
        attributes["content"]
        for tag, attributes in parts.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert not {"connect-src", "font-src", "frame-src"} & set(rules)
    assert "http" not in policy


def test_licences_of_what_is_inside_are_in_it(page):
    for name in ("dagre", "uplot"):
        assert re.search(rf"^\S*{name} \d", page.html, re.MULTILINE)
    assert page.html.count("Permission is hereby granted") >= 2


def test_a_notebook_shows_the_page_in_a_frame(nasty):
    ((tag, attributes),) = Parts(nasty._repr_html_()).tags
    assert tag == "iframe"
    assert attributes["title"] == NASTY
    parts = Parts(attributes["srcdoc"])
    assert parts.text_of("title") == [NASTY]
    # The data, the viewer, and what brings the viewer in.
    data, viewer, loader = parts.text_of("script")
    assert unpacked(data) == json.loads(json.dumps(nasty.payload))
    bundle = page_module.read_bundle()
    assert unpacked(viewer) == {"script": bundle.script, "style": bundle.style}
    assert loader == bundle.loader.strip()
    # It asks for nothing, either.
    policies = [tag.get("content", "") for _, tag in parts.tags if "http-equiv" in tag]
    assert [policy.partition(";")[0] for policy in policies] == ["default-src 'none'"]
    assert "http" not in policies[0]
    assert not any("src" in tag or "href" in tag for _, tag in parts.tags)
    assert "dagre" in attributes["srcdoc"]


def unpacked(text):
    return json.loads(zlib.decompress(base64.b64decode(text)))


@pytest.fixture
def static(tmp_path, monkeypatch):
    """Return the folder where the viewer is looked for; nothing is in it."""
    monkeypatch.setattr(page_module, "files", lambda _: tmp_path)
    page_module.read_bundle.cache_clear()
    (tmp_path / "static").mkdir()
    yield tmp_path / "static"
    page_module.read_bundle.cache_clear()


def test_without_the_viewer_the_error_says_how_to_build_it(page, static):
    with pytest.raises(ReportError, match="make web"):
        page.save(static / "page.html")
    assert list(static.iterdir()) == []


def test_a_script_cannot_end_its_element(static):
    for name, text in (
        ("viewer.js", "'</script>'"),
        ("viewer.css", "p {}"),
        ("loader.js", "'</script>'"),
        ("LICENSES.txt", "one --> two"),
    ):
        (static / name).write_text(text)
    found = page_module.read_bundle()
    assert "</script" not in found.script
    assert "</script" not in found.loader
    assert "--" not in found.licences
