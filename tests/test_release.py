"""What a release rests on: one version, a changelog for it, files for every package."""

import re
import runpy
from pathlib import Path

import pytest
import setuptools

from geutil.version import __version__

ROOT = Path(__file__).parents[1]
TEXTS = ["setup.py", "pyproject.toml", "Makefile", "README.md", "CONTRIBUTING.md"]


@pytest.fixture(scope="module")
def given():
    """Return what setup.py hands to setuptools."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **settings: found.update(settings))
        patch.chdir(ROOT)
        runpy.run_path(str(ROOT / "setup.py"))
    return found


def test_the_version_is_in_one_place(given):
    assert given["version"] == __version__
    for name in TEXTS:
        assert __version__ not in (ROOT / name).read_text(), name
    holders = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "geutil").rglob("*.py")
        if f'"{__version__}"' in path.read_text()
    ]
    assert holders == ["geutil/version.py"]


def test_the_changelog_begins_with_the_version():
    sections = re.findall(
        r"^## \[(.+?)\] - (Unreleased|\d{4}-\d\d-\d\d)$",
        (ROOT / "CHANGELOG.md").read_text(),
        re.MULTILINE,
    )
    assert sections[0][0] == __version__
    assert all(day != "Unreleased" for _, day in sections[1:])


def test_every_folder_with_modules_is_a_package(given):
    folders = {path.parent for path in (ROOT / "geutil").rglob("*.py")}
    names = {".".join(f.relative_to(ROOT).parts) for f in folders}
    assert names == set(given["packages"])


def test_files_that_are_no_modules_are_taken_along(given):
    """Other files would be missing from the wheel."""
    package_data = given["package_data"]
    taken = {
        path
        for package, patterns in package_data.items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    there = {
        path
        for path in (ROOT / "geutil").rglob("*")
        if path.is_file() and path.suffix != ".py" and path.parent.name != "__pycache__"
    }
    assert there == taken


def test_every_requirement_of_an_extra_has_an_upper_bound(given):
    for extra, needs in given["extras_require"].items():
        for need in needs:
            assert re.search(r">=[\w.]+,<[\w.]+$", need), (extra, need)


def test_the_licence_goes_along(given):
    assert given["license"] == "Apache-2.0"
    (name,) = given["license_files"]
    assert "Apache License" in (ROOT / name).read_text()
