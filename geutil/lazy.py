"""Names of a package that are looked up when they are first used, and notebooks' views.

Importing TensorFlow takes seconds, so `import geutil` does not: nothing is imported
before a name is asked for (PEP 562). Objects of any layer show themselves in a notebook
likewise: the package's root, which knows all layers, provides the function that draws.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

_SESSIONS = "tensorflow.python.client.session"
"""Has been imported if there can be Sessions and functions already."""


def names(
    package: str,
    exported: Collection[str],
    submodules: Collection[str],
    homes: Collection[str],
    aliases: Mapping[str, str],
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package.

    Args:
        package: its name.
        exported: all that it exports.
        submodules: those modules in it that are imported when they are asked for.
        homes: the submodules where the other names are, lower layers first: so no
            search imports a layer above that of the name.
        aliases: second names, and the names they stand for.

    Cost: the imports, once for each name.
    """
    module = sys.modules[package]

    def find(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")
        if name in exported:
            exported_name = aliases.get(name, name)
            for home in homes:
                place = importlib.import_module(f"{package}.{home}")
                if exported_name in place.__all__:
                    return getattr(place, exported_name)
        raise AttributeError(f"module '{package}' has no attribute '{name}'")

    def get_attribute(name: str) -> Any:
        attribute = find(name)
        # Python asks only for names that the module lacks, so once for each.
        setattr(module, name, attribute)
        return attribute

    def list_names() -> list[str]:
        return sorted({*vars(module), *exported, *submodules})

    return get_attribute, list_names


def names_of(
    package: str, homes: Mapping[str, Collection[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package whose modules are known by name.

    So a part of it that needs no TensorFlow can be imported without.

    Args:
        package: its name.
        homes: the exported names by the submodule that they are in, or by the whole
            name of a module elsewhere: the room that they have moved to.

    Cost: the imports, once for each name.
    """
    module = sys.modules[package]
    home_of = {name: home for home, exported in homes.items() for name in exported}

    def get_attribute(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        home = home_of[name]
        elsewhere = home.startswith("geutil.")
        place = importlib.import_module(home if elsewhere else f"{package}.{home}")
        attribute = getattr(place, name)
        setattr(module, name, attribute)
        return attribute

    def list_names() -> list[str]:
        return sorted({*vars(module), *home_of})

    return get_attribute, list_names


_provided: dict[str, tuple[str, str]] = {}


def provide(job: str, module: str, function: str) -> None:
    """Let a function of a higher layer do a job that classes of lower ones offer.

    The package's root, which knows all layers, says so.

    Args:
        job: a name for the job.
        module: the module of the function, which is imported when it is needed.
        function: its name.
    """
    _provided[job] = module, function


def provided(job: str) -> Callable[..., Any]:
    """Return the function of a higher layer that does a job."""
    module, function = _provided[job]
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def watch_what_exists(package: str) -> None:
    """Notice Sessions and functions from now on, if there can be any already.

    If not, they are noticed from the first use of a name that needs TensorFlow. See
    `geutil.graph.state`.
    """
    if _SESSIONS in sys.modules:
        importlib.import_module(f"{package}.graph.state")


DRAWING = "drawing"
"""The job of the function that takes what to show, and returns HTML."""


class Shown:
    """Base of objects that a notebook shows as a drawing or table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        return str(provided(DRAWING)(self))
