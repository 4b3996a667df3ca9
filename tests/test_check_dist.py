"""The check of wheel and source archive finds what it looks for."""

import tarfile
import zipfile

import pytest

from tools import check_dist

ABOUT = "geutil-1.0.dist-info"
WHEEL = {
    "geutil/__init__.py": "",
    "geutil/py.typed": "",
    f"{ABOUT}/METADATA": "Name: geutil",
    f"{ABOUT}/licenses/LICENSE": "Apache License",
}


def write_wheel(place, files):
    place.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(place, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return place


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Return what writes a wheel into the dist/ of a tree with two files."""
    for name in ("geutil/__init__.py", "geutil/py.typed"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(check_dist, "ROOT", tmp_path)
    monkeypatch.setattr(check_dist, "SMOKE", tmp_path / "tests" / "smoke")
    same = write_wheel(tmp_path / "build" / "geutil.whl", WHEEL)
    monkeypatch.setattr(check_dist, "wheel_of_tree", lambda: same)

    def write(files):
        write_wheel(tmp_path / "dist" / "geutil.whl", files)
        return list(check_dist.wheel_faults())

    return write


def without(name):
    return {n: text for n, text in WHEEL.items() if not n.endswith(name)}


def test_a_whole_wheel_has_no_faults(tree):
    assert tree(WHEEL) == []


WRONG = {
    "a stranger": (WHEEL | {"tests/test_x.py": ""}, "tests/test_x.py does not belong"),
    "a module too many": (WHEEL | {"geutil/old.py": ""}, "geutil/old.py is not in the"),
    "no types": (without("py.typed"), "geutil/py.typed is not in the wheel"),
    "no licence": (without("LICENSE"), "the wheel has no LICENSE"),
    "another text": (
        WHEEL | {"geutil/__init__.py": "x = 1"},
        "geutil/__init__.py differs between the wheels",
    ),
}


@pytest.mark.parametrize(("files", "fault"), WRONG.values(), ids=WRONG)
def test_faults_of_wheels(tree, files, fault):
    assert any(found.startswith(fault) for found in tree(files))


def test_pages_that_were_not_built(tree, tmp_path):
    (tmp_path / "web").mkdir()
    (fault,) = tree(WHEEL)
    assert "make web" in fault


def test_faults_of_archives(tree, tmp_path):
    (tmp_path / "dist").mkdir()
    with tarfile.open(tmp_path / "dist" / "geutil.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "geutil" / "py.typed", "geutil-1.0/geutil/py.typed")
        archive.add(
            tmp_path / "geutil" / "py.typed", "geutil-1.0/web/node_modules/x.js"
        )
    faults = list(check_dist.sdist_faults())
    assert "geutil/__init__.py is not in the archive" in faults
    assert "LICENSE is not in the archive" in faults
    assert "web/node_modules/x.js does not belong into the archive" in faults
    assert not any("py.typed" in fault for fault in faults)


def test_without_a_build_there_is_nothing_to_check(tree):
    with pytest.raises(SystemExit, match="make dist"):
        check_dist.only("*.whl")
