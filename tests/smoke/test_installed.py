"""What is installed: the package, whole, and nothing besides."""

import importlib
import importlib.metadata
import importlib.resources
import os
import pkgutil
import re
import sys
from pathlib import Path

import pytest

import geutil

# What they show, other tests show as well, where geutil is not installed.
pytestmark = [pytest.mark.smoke, pytest.mark.thorough]
INSTALLED_IN = os.environ.get("GEUTIL_INSTALLED_IN")
installed = pytest.mark.skipif(INSTALLED_IN is None, reason="runs from the tree")


@installed
def test_the_package_is_that_of_the_environment():
    home = Path(INSTALLED_IN).resolve()
    assert Path(geutil.__file__).resolve().is_relative_to(home)
    assert Path(sys.prefix).resolve() == home
    assert "site-packages" in geutil.__file__


@installed
def test_nothing_else_is_installed():
    files = importlib.metadata.files("geutil")
    tops = {file.parts[0] for file in files}
    assert tops == {"geutil", f"geutil-{geutil.__version__}.dist-info", ".."}
    (command,) = [file for file in files if file.parts[0] == ".."]
    assert command.name == "geutil"
    assert not any({"tests", "benchmarks"} & set(file.parts) for file in files)


@installed
def test_the_licence_is_installed():
    (licence,) = [f for f in importlib.metadata.files("geutil") if f.name == "LICENSE"]
    assert "Apache License" in licence.read_text()


def test_it_says_that_it_has_types():
    assert (importlib.resources.files("geutil") / "py.typed").is_file()


def test_the_version():
    assert importlib.metadata.version("geutil") == geutil.__version__


def test_it_requires_tensorflow_and_numpy():
    needs = importlib.metadata.requires("geutil")
    always = {re.match(r"[\w-]+", n)[0] for n in needs if "extra ==" not in n}
    assert always == {"tensorflow", "numpy"}


def test_every_module_is_there():
    # The command's modules need its extra; running it imports them. The kernels of the
    # planner need one as well.
    needs_extra = ("geutil.cli", "geutil.gradients.planner.sequence_search")
    names = [
        module.name
        for module in pkgutil.walk_packages(geutil.__path__, "geutil.")
        if not module.name.startswith(needs_extra)
    ]
    assert len(names) > 200
    for name in names:
        importlib.import_module(name)


def test_every_name_is_found():
    for name in geutil.__all__:
        assert getattr(geutil, name) is not None
