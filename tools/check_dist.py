"""Checks the wheel and the source archive in dist/, and that the wheel works alone.

`make check-dist` runs this. The wheel was built from the source archive; it must hold
what a wheel from the tree holds. It is installed where there is nothing but what it
requires and pytest, and the tests marked `smoke` run there, from a copy of their folder
outside the tree: nothing of the tree can stand in for what the wheel lacks.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "build" / "check-dist"
SMOKE = ROOT / "tests" / "smoke"
INSTALLED_IN = "GEUTIL_INSTALLED_IN"
"""Tells the tests where geutil must be."""
PAGES = "geutil/report/static/"
"""What `make web` builds."""
LEFT_OUT = {"RECORD"}
"""Holds the hashes of the other files."""
IN_SDIST = ["LICENSE", "README.md", "CHANGELOG.md", "setup.py", "pyproject.toml"]


def only(pattern: str) -> Path:
    """Return the one file in dist/ of a pattern."""
    found = list((ROOT / "dist").glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"dist/ holds {len(found)} files {pattern}; run `make dist`")
    return found[0]


def files_of(wheel: Path) -> dict[str, str]:
    """Return the hashes of the files in a wheel by their names."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: hashlib.sha256(archive.read(name)).hexdigest()
            for name in archive.namelist()
            if Path(name).name not in LEFT_OUT
        }


def source_files() -> set[str]:
    """Return what of the tree must be in the wheel."""
    found = {p for kind in ("*.py", "*.tsv") for p in (ROOT / "geutil").rglob(kind)}
    found |= {p for p in (ROOT / PAGES).rglob("*") if p.is_file()}
    found.add(ROOT / "geutil" / "py.typed")
    return {p.relative_to(ROOT).as_posix() for p in found}


def wheel_faults() -> Iterator[str]:
    """Yield what is wrong with the files of the wheel."""
    wheel = only("*.whl")
    files = files_of(wheel)
    package = {name for name in files if name.startswith("geutil/")}
    about = {Path(name).name for name in files if ".dist-info/" in name}
    strangers = {n for n in files if n not in package and ".dist-info/" not in n}
    yield from (f"{name} does not belong into the wheel" for name in sorted(strangers))
    wanted = source_files()
    yield from (f"{name} is not in the wheel" for name in sorted(wanted - package))
    yield from (f"{name} is not in the tree" for name in sorted(package - wanted))
    if "LICENSE" not in about:
        yield "the wheel has no LICENSE"
    if (ROOT / "web").is_dir() and not any(n.startswith(PAGES) for n in package):
        yield f"the wheel has nothing in {PAGES}; run `make web` before `make dist`"
    yield from differing_faults(files, files_of(wheel_of_tree()))


def wheel_of_tree() -> Path:
    """Build a wheel from the tree itself and return it."""
    place = PLACE / "tree"
    # What an earlier build left there would get into the wheel.
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)
    run("-m", "build", "--wheel", "--outdir", str(place), str(ROOT))
    (wheel,) = place.glob("*.whl")
    return wheel


def differing_faults(files: dict[str, str], others: dict[str, str]) -> Iterator[str]:
    """Yield how the wheel differs from that of the tree."""
    for name in sorted(files.keys() | others.keys()):
        if files.get(name) != others.get(name):
            yield f"{name} differs between the wheels of the archive and of the tree"


def sdist_faults() -> Iterator[str]:
    """Yield what is wrong with the files of the source archive."""
    with tarfile.open(only("*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = source_files() | set(IN_SDIST)
    wanted |= {p.relative_to(ROOT).as_posix() for p in SMOKE.glob("*.py")}
    yield from (f"{name} is not in the archive" for name in sorted(wanted - names))
    built = {n for n in names if "node_modules" in n or "__pycache__" in n}
    yield from (f"{name} does not belong into the archive" for name in sorted(built))


def smoke_faults() -> Iterator[str]:
    """Yield what fails where the wheel alone is installed."""
    wheel = only("*.whl")
    home = PLACE / "environment"
    venv.create(home, clear=True, with_pip=True)
    python = home / "bin" / "python"
    install(python, str(wheel), "pytest")
    if not smoke_passes(home):
        yield "the smoke tests fail without extras"
    install(python, f"geutil[cli] @ {wheel.as_uri()}")
    if not smoke_passes(home, "test_command.py"):
        yield "the smoke tests of the command fail with its extra"


def install(python: Path, *what: str) -> None:
    """Install into an environment."""
    run("-m", "pip", "install", "--quiet", *what, python=python)


def smoke_passes(home: Path, only_file: str = "") -> bool:
    """Run the smoke tests in an environment, far from the tree."""
    with tempfile.TemporaryDirectory(prefix="geutil-smoke-") as folder:
        shutil.copytree(SMOKE, Path(folder, "smoke"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        command = [str(home / "bin" / "python"), "-I", "-m", "pytest", "-m", "smoke"]
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", f"smoke/{only_file}"],
            cwd=folder,
            env=os.environ | {INSTALLED_IN: str(home)},
            check=False,
        )
        return done.returncode == 0


def run(*arguments: str, python: Path | str = sys.executable) -> None:
    """Run Python, outside the tree; end with what it says if it fails."""
    done = subprocess.run(
        [str(python), *arguments],
        cwd=PLACE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(done.args)}\n{done.stdout}")


CHECKS: list[Callable[[], Iterator[str]]] = [wheel_faults, sdist_faults, smoke_faults]


def main() -> None:
    """Run all checks; end with the faults that they find."""
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir(parents=True)
    faults = [fault for check in CHECKS for fault in check()]
    if faults:
        raise SystemExit("\n".join(faults))
    print(f"{only('*.whl').name} and {only('*.tar.gz').name} are as they should be")


if __name__ == "__main__":
    main()
