"""The site builds without a warning, shows every public name, and needs no network."""

import importlib
import inspect
import os
import re
import zlib
from pathlib import Path

import pytest

from tests.thorough import thorough

# `make docs` builds the site, warnings being errors, and runs these.
pytestmark = thorough
ROOT = Path(__file__).parents[2]

_NAMES = """
batchnorm capabilities edit gradients gradients.tape graph jobs match memory model
pipeline quantize report reroute select subgraph tflite transform rewrite rewrite.rules
util
"""
PACKAGES = [f"geutil.{name}" for name in _NAMES.split()]
SUBPACKAGES = {"rules"}
ALIASES = {"ph", "sgv", "sgv_scope", "__version__"}
"""Names of `geutil` that stand for documented ones, or need no page."""


def configuration(**settings):
    from mkdocs.config import load_config

    return load_config(str(ROOT / "mkdocs.yml"), **settings)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the site that was just built, or build it: a warning would end it."""
    built = os.environ.get("GEUTIL_SITE")
    if built:
        return ROOT / built
    from mkdocs.commands.build import build

    place = tmp_path_factory.mktemp("site")
    build(configuration(strict=True, site_dir=str(place)))
    return place


@pytest.fixture(scope="module")
def documented(site):
    """Return the names in the inventory of the reference."""
    blob = (site / "objects.inv").read_bytes()
    compressed = blob.split(b"\n", 4)[4]
    lines = zlib.decompress(compressed).decode().splitlines()
    return {line.split()[0] for line in lines}


def test_every_public_name_is_in_the_reference(documented):
    import geutil as ge

    missing = [
        f"{package}.{name}"
        for package in PACKAGES
        for name in set(importlib.import_module(package).__all__) - SUBPACKAGES
        # A module of the same name hides it from what reads the sources.
        if not {f"{package}.{name}", f"{package}.{name}.{name}"} & documented
    ]
    assert missing == []
    packages = {n for n in ge.__all__ if inspect.ismodule(getattr(ge, n))}
    assert {f"geutil.{name}" for name in packages} <= set(PACKAGES)
    last_parts = {name.rpartition(".")[2] for name in documented}
    assert set(ge.__all__) - ALIASES - packages <= last_parts


def test_every_error_is_in_the_reference(documented):
    from geutil import errors

    raised = {name for name in vars(errors) if name.endswith("Error")}
    assert {f"geutil.errors.{name}" for name in raised} <= documented


def test_every_option_of_every_command_is_in_the_reference(site):
    import typer

    from geutil.cli.commands import app

    page = (site / "reference" / "commands" / "index.html").read_text()
    group = typer.main.get_command(app)
    assert group.commands
    for name, command in group.commands.items():
        section = page.partition(f'<h2 id="geutil-{name}">')[2].partition("<h2 ")[0]
        assert section, name
        for parameter in command.params:
            hidden = getattr(parameter, "hidden", False)
            if parameter.param_type_name == "option" and not hidden:
                for option in parameter.opts:
                    is_told = f"<code>{option}" in section
                    # Hidden are old spellings.
                    assert is_told is not parameter.hidden, f"{name} {option}"


def test_the_navigation_lists_every_page():
    listed = set(_pages(configuration()["nav"]))
    there = {
        page.relative_to(ROOT / "docs").as_posix()
        for page in (ROOT / "docs").rglob("*.md")
    }
    assert there <= listed
    assert listed - there == {"changelog.md", "contributing.md", "licence.md"}


def _pages(entries):
    for entry in entries:
        if isinstance(entry, dict):
            (entry,) = entry.values()
        if isinstance(entry, str):
            yield entry
        else:
            yield from _pages(entry)


def test_pages_load_nothing_from_elsewhere(site):
    loads = re.compile(
        r"<(?:script|img|iframe)[^>]*\ssrc=[\"']?(https?:|//)"
        r"|<link[^>]*rel=[\"']?(?:stylesheet|preconnect|icon)[^>]*href=[\"']?(https?:|//)"
    )
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        assert not loads.search(page.read_text(encoding="utf-8")), page


def test_the_changelog_is_shown_and_not_copied(site):
    page = (site / "changelog" / "index.html").read_text()
    assert "The graph editor for TensorFlow 2.16" in page
    assert not (ROOT / "docs" / "changelog.md").exists()
