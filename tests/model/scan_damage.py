"""Damaged files of every format, looked at in a process whose death is noticed.

`write_all` writes small models, `run` damages copies and asks `powers` and `inspect`
what each is, in the process of `fuzzing`, by `python -m tests.model.scan_damage`.
"""

from __future__ import annotations

import io
import json
import random
import resource
import shutil
import time
import traceback
import zipfile
from contextlib import suppress
from pathlib import Path

from tests.model import fuzzing
from tests.model.field_mutations import mutate_fields
from tests.model.mutations import mutate

SHARES = {
    **dict.fromkeys(("saved_model.pb", "saved_model.pbtxt", "a.pb", "a.pbtxt"), 11),
    **dict.fromkeys(("a.meta", "a.tflite", "variables.index", "keras_metadata.pb"), 11),
    # Each takes processes of its own, for HDF5.
    "a.keras": 8,
    "a.h5": 4,
}
"""What is damaged, and how many of a hundred jobs each gets."""
_PROTOS = {
    "saved_model.pb": "SavedModel",
    "a.pb": "GraphDef",
    "a.meta": "MetaGraphDef",
}
_SLOW = 10.0
"""Seconds of the processor that a look may take."""
TIMES, FLOOR = 4, 16 << 20
"""How many times a file's size memory may grow, where that is more than the floor."""
OK = REFUSED, TOLD = "refused", "told"


def write_all(folder: Path) -> None:
    """Write a whole file of each format."""
    import keras
    import tensorflow as tf
    import tf_keras
    from google.protobuf import text_format

    from testdata.powers import FILES, HIDDEN, save
    from tests.model import samples
    from tests.tflite_files import flex

    samples.write_all(folder)
    shutil.move(folder / "frozen.pb", folder / "a.pb")
    shutil.move(folder / "frozen.pbtxt", folder / "a.pbtxt")
    save(HIDDEN["branch"], folder / "net", folder / "marker")
    shutil.copytree(folder / "net", folder / "text")
    data = (folder / "text" / "saved_model.pb").read_bytes()
    text = text_format.MessageToString(_proto("SavedModel").FromString(data))
    (folder / "text" / "saved_model.pb").unlink()
    (folder / "text" / "saved_model.pbtxt").write_text(text)
    x = tf_keras.Input([3])
    old = tf_keras.Model(x, tf_keras.layers.Dense(2)(x))
    old.save(folder / "old", save_format="tf")
    network = keras.Sequential(
        [keras.Input([4, 3]), keras.layers.LSTM(4), keras.layers.Dense(2)]
    )
    network.compile("adam", "mse")
    for suffix in ("keras", "h5"):
        network.save(folder / f"a.{suffix}")
    (folder / "a.tflite").write_bytes(flex().blob)
    FILES["MetaGraph"].write(folder, folder / "marker")
    tf.keras.backend.clear_session()


def damaged(folder: Path, target: str, seed: int, scratch: Path) -> Path:
    """Damage a copy of a file, and return what is to be looked at."""
    owner = {
        "saved_model.pb": "net",
        "saved_model.pbtxt": "text",
        "keras_metadata.pb": "old",
        "variables.index": "lookup",
    }.get(target)
    if owner is None:
        path = victim = scratch / target
        shutil.copy(folder / target, path)
    else:
        path = scratch / owner
        shutil.copytree(folder / owner, path)
        victim = path / ("variables" if target == "variables.index" else "") / target
    victim.write_bytes(_changed(victim.read_bytes(), target, seed))
    return path


def _changed(data: bytes, target: str, seed: int) -> bytes:
    rng = random.Random(f"{target} {seed}")
    ways = [lambda: mutate(data, rng)[1], lambda: _with_lengths(data, rng)]
    if target in _PROTOS:
        ways += [lambda: mutate_fields(data, _proto(_PROTOS[target]), rng)] * 2
    if target == "a.keras":
        ways += [lambda: _with_entries(data, rng)] * 3
    return rng.choice(ways)()


def _proto(name: str):
    from geutil.graph import protos

    return getattr(protos, name)


def _with_lengths(data: bytes, rng: random.Random) -> bytes:
    """Write numbers over others: lengths, offsets and counts of what follows."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        size = rng.choice((1, 2, 4, 8))
        at = rng.randrange(max(1, len(changed) - size))
        if rng.random() < 0.5:
            other = rng.randrange(max(1, len(changed) - size))
            number = changed[other : other + size]
        else:
            largest = 256**size - 1
            values = (0, 1, largest, largest // 2, len(data), rng.randrange(largest))
            number = min(rng.choice(values), largest).to_bytes(size, "little")
        changed[at : at + size] = number
    return bytes(changed)


def _with_entries(data: bytes, rng: random.Random) -> bytes:
    """Change, leave out or repeat entries of an archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = [(name, archive.read(name)) for name in archive.namelist()]
    place = rng.randrange(len(entries))
    name, inner = entries[place]
    action = rng.choice(
        ("bytes", "config", "config", "config", "twice", "name", "less")
    )
    if action == "bytes":
        entries[place] = (name, mutate(inner, rng)[1])
    elif action == "config":
        place = [n for n, _ in entries].index("config.json")
        config = json.loads(entries[place][1])
        entries[place] = ("config.json", _json(config, rng))
    elif action == "twice":
        entries.append((name, mutate(inner, rng)[1]))
    elif action == "name":
        entries[place] = (rng.choice(("../x", "/x", "", "a\0b", "x" * 60000)), inner)
    else:
        del entries[place]
    made = io.BytesIO()
    method = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(made, "w", method) as archive:
        for name, inner in entries:
            archive.writestr(zipfile.ZipInfo(name), inner)
    return made.getvalue()


def _json(config, rng: random.Random) -> bytes:
    """Put something else in one or several places of a configuration."""
    places = []
    waiting = [config]
    while waiting:
        item = waiting.pop()
        keys = list(item) if isinstance(item, dict) else range(len(item))
        for key in keys:
            places.append((item, key))
            if isinstance(item[key], dict | list):
                waiting.append(item[key])
    for _ in range(rng.choice((1, 2, 5))):
        owner, key = rng.choice(places)
        other, another = rng.choice(places)
        values = (None, 0, -1, 1e400, "", "x" * 1000, [], {}, [[]], {"class_name": 1})
        with suppress(KeyError, IndexError):
            moved = json.dumps(other[another])
            owner[key] = rng.choice((json.loads(moved), *values))
    if rng.random() < 0.05:
        return b"[" * rng.choice((10, 1000, 100_000))
    return json.dumps(config).encode()


def _looked_at(folder: Path, target: str, seed: int, scratch: Path) -> tuple[str, str]:
    """Ask what a damaged file is, and return what became of that."""
    from geutil.errors import GeutilError
    from geutil.model import inspect, powers

    path = damaged(folder, target, seed, scratch)
    size = sum(f.stat().st_size for f in [path, *path.rglob("*")] if f.is_file())
    result = TOLD
    for call in (powers, inspect):
        if call.__name__ == "inspect" and path.suffix == ".meta":
            # It does not read these.
            continue
        before = _peak_from_here()
        begin = time.process_time()
        try:
            str(call(path))
        except GeutilError as error:
            # Messages on a graph or a MetaGraph alone do not name it.
            if str(path) not in str(error) and path.suffix not in (".pb", ".meta"):
                return "names no file", str(error)
            result = REFUSED
        except BaseException:
            return "raised another error", traceback.format_exc()[-3000:]
        seconds = time.process_time() - begin
        if seconds > _SLOW:
            return "slow", f"{call.__name__}: {seconds:.1f} s"
        grown = _status("VmHWM") - before
        if grown > max(FLOOR, TIMES * size):
            return "large", f"{call.__name__}: {grown:,} bytes for {size:,}"
    return result, ""


def _peak_from_here() -> int:
    """Begin to measure the peak of resident memory anew; return what is resident."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(ln.split()[1]) for ln in lines if ln.startswith(key))


def jobs_for(count: int) -> list[tuple[str, int]]:
    """Return so many jobs, shared among the targets."""
    total = sum(SHARES.values())
    return [
        (target, seed)
        for target, share in SHARES.items()
        for seed in range(max(1, count * share // total))
    ]


if __name__ == "__main__":
    from geutil.graph import protos  # noqa: F401
    from geutil.model.files import hdf5

    # Processes start slowly where others run.
    hdf5._SECONDS = 600
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    fuzzing.serve(_looked_at)
