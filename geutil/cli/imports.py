"""Imports of TensorFlow and Keras without the modules that no command needs.

`import tensorflow` imports Keras, which imports pandas and matplotlib where these are
installed, and all of two public interfaces, of which a command uses few packages; and
Python collects garbage among the millions of objects that stay.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

# TensorFlow imports it at its end, and takes that it cannot be imported.
_KERAS = ("keras.src.optimizers", "tf_keras.src.optimizers")
# Keras draws, feeds tables, downloads and shows with these, and goes without them.
_OF_KERAS = ("pandas", "matplotlib", "matplotlib.pyplot", "IPython", "requests", "PIL")
_SELDOM = (50_000, 20, 20)
"""Thresholds of collections: graphs are made of objects that stay. Measured: to open
and copy MobileNetV2 takes 1.6 CPU seconds in the place of 2.1."""
_INTERFACES = "tensorflow._api.v2."
"""The packages of TensorFlow's public names, of versions 2 and 1."""
_PUBLIC_NAME = re.compile(r"^from (\S+) import (\S+)(?: as (\S+))?", re.MULTILINE)
"""A line of such a package: each imports one name."""
_REGISTERING = ("debugging.experimental", "linalg", "lite", "nn", "saved_model", "tpu")
"""Public packages whose modules register ops, gradients and types of a file's graph."""


def import_tensorflow() -> None:
    """Import TensorFlow without Keras, which it loads where something asks for it.

    Its public packages are loaded when they are asked for, too.

    Cost: 1.1 CPU seconds in the place of 3.3.
    """
    with _lean(_KERAS):
        sys.meta_path.insert(0, _Deferring())
        import tensorflow as tf

        _keep_names(tf)


def register_all() -> None:
    """Register ops, gradients and types that the graph in a file may name.

    Cost: 0.3 CPU seconds.
    """
    import tensorflow as tf

    for name in _REGISTERING:
        _executed(reduce(getattr, name.split("."), tf))


def import_keras() -> None:
    """Import the Keras that `tf.keras` is, behind TensorFlow.

    Cost: 0.2 CPU seconds in the place of 1.1 where pandas and matplotlib are installed.
    """
    with _lean(_OF_KERAS):
        import tensorflow as tf

        # A name of it makes the module load.
        _ = tf.keras.Model


class _Deferring(MetaPathFinder):
    """Finds TensorFlow's public packages, and defers their execution."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(_INTERFACES):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Later(spec.loader)
        return spec


class _Later(Loader):
    """Makes a module that is executed when it is first asked for a name.

    `importlib.util.LazyLoader` refuses modules that put a wrapper in their place.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.sources: dict[str, tuple[str, str]] | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _Deferred


class _Deferred(ModuleType):
    """A module that was found, and not executed yet."""

    def __getattr__(self, name: str) -> Any:
        # One name of `tf.nn` is a Keras of 100 modules: the others do not load it.
        found = _names_in(self).get(name)
        if found is None:
            return getattr(_executed(self), name)
        value = _imported(*found)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return dir(_executed(self))


def _names_in(module: ModuleType) -> Mapping[str, tuple[str, str]]:
    """Return the module and the name there that each public name is imported from."""
    loader = getattr(module.__spec__, "loader", None)
    if not isinstance(loader, _Later) or not isinstance(
        loader.loader, SourceFileLoader
    ):
        return {}
    if loader.sources is None:
        text = Path(loader.loader.path).read_text()
        loader.sources = {
            alias or name: (source, name)
            for source, name, alias in _PUBLIC_NAME.findall(text)
        }
    return loader.sources


def _imported(source: str, name: str) -> Any:
    """Return a name of a module or a module in a package, as `from` imports it."""
    # Public packages import packages of theirs alone, and are not executed for these.
    module = None if source.startswith(_INTERFACES) else import_module(source)
    if hasattr(module, name):
        return getattr(module, name)
    return import_module(f"{source}.{name}")


def _executed(module: ModuleType) -> ModuleType:
    """Execute a module that was deferred; return it, or its replacement."""
    spec = module.__spec__
    if spec and isinstance(spec.loader, _Later):
        # Before, so that circles of imports find its names as they always do.
        module.__class__ = ModuleType
        module.__loader__ = spec.loader = spec.loader.loader
        spec.loader.exec_module(module)
    return sys.modules[module.__name__]


def _keep_names(tensorflow: ModuleType) -> None:
    """Keep public packages in their place, where a package beside has that name.

    `tf.lite` is none of `tensorflow.lite`, whose import would replace it.
    """
    folder = Path(str(tensorflow.__file__)).parent
    for name, public in list(vars(tensorflow).items()):
        if isinstance(public, _Deferred) and (folder / name).is_dir():
            import_module(f"{tensorflow.__name__}.{name}")
            setattr(tensorflow, name, public)


@contextmanager
def _lean(absent: Sequence[str]) -> Iterator[None]:
    """Import as if some modules were not installed, without collections of garbage.

    The objects of the modules imported are no garbage: no later collection looks at
    them.
    """
    hidden = [name for name in absent if name not in sys.modules]
    collects = gc.isenabled()
    gc.disable()
    # A module that is None there is one that cannot be imported.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            if sys.modules.get(name) is None:
                sys.modules.pop(name, None)
        gc.freeze()
        if collects:
            gc.set_threshold(*_SELDOM)
            gc.enable()
