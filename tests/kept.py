"""Folders on disk that are made once, for all workers and for later runs."""

import fcntl
import hashlib
import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "kept"


def kept(make: Callable[[Path], None], *sources: Path | Any) -> Path:
    """Return a folder that `make(folder)` has filled, in this run or in an earlier one.

    It is made again when the module of `make`, one of the sources (modules, files or
    folders) or the version of TensorFlow or Keras is another one. If geutil had a part
    in it, `geutil` is one of the sources. Workers wait for the one that makes it.
    Nobody may write into it later.
    """
    name = f"{make.__module__}.{make.__qualname__}".replace("<", "").replace(">", "")
    digest = hashlib.sha256(f"{tf.__version__} {tf.keras.__version__}".encode())
    for path in [_path(inspect.getmodule(make)), *map(_path, sources)]:
        files = [path] if path.is_file() else sorted(path.rglob("*.py"))
        for file in files:
            digest.update(file.read_bytes())
    FOLDER.mkdir(parents=True, exist_ok=True)
    target = FOLDER / f"{name}-{digest.hexdigest()[:16]}"
    with (FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            for old in FOLDER.glob(f"{name}-*"):
                shutil.rmtree(old)
            fresh = FOLDER / f"{name}.new"
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
            make(fresh)
            # Only what is complete has the name.
            fresh.rename(target)
    return target


def _path(source: Any) -> Path:
    if isinstance(source, Path):
        return source
    file = Path(inspect.getfile(source))
    return file.parent if file.name == "__init__.py" else file
