"""Damaged files of every format, in a process whose death is noticed.

`write_all` writes small models, `run` damages copies and asks `powers` and `inspect`
what each is, and opens it if it can be opened. `python -m tests.model.fuzzing ANSWERS
JOBS FOLDER` is the process: it answers each job with a line.
"""

import io
import json
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.model.mutations import mutate, mutate_fields
from tests.processes import run_python

TARGETS = {
    "a.pb": ("a.pb", "", "GraphDef", 18),
    "a.pbtxt": ("a.pbtxt", "", "", 14),
    "saved_model.pb": ("net", "saved_model.pb", "SavedModel", 6),
    "saved_model.pbtxt": ("text", "saved_model.pbtxt", "", 6),
    "signatures": ("lookup", "saved_model.pb", "SavedModel", 12),
    "index": ("lookup", "variables/variables.index", "", 10),
    "data": ("lookup", "variables/variables.data-00000-of-00001", "", 6),
    "keras_metadata.pb": ("old", "keras_metadata.pb", "", 6),
    "a.meta": ("a.meta", "", "MetaGraphDef", 6),
    "a.tflite": ("a.tflite", "", "", 6),
    # Each takes processes of its own, for HDF5.
    "a.keras": ("a.keras", "", "", 4),
    "a.h5": ("a.h5", "", "", 2),
}
"""What is looked at, which of its files is damaged, its proto, its share of jobs."""
OPENED_TOO = ("a.pb", "a.pbtxt", "saved_model.pb", "signatures", "index", "data")
_SECONDS = 600
"""It ends a hang only."""
_EXTRA_BYTES = 6 << 30
_SLOW = 10.0
"""Seconds of the processor that a look may take."""
TIMES, FLOOR = 4, 16 << 20
"""How many times a file's size memory may grow, where that is more than the floor."""
TOLD, OPENED, REFUSED = "told", "opened", "refused"


@dataclass(frozen=True)
class Outcome:
    """What became of one damaged model.

    Attributes:
        target: which file was damaged.
        seed: the seed of the damage.
        result: "told", "refused", or what else happened.
        detail: "opened" or "refused" if it was opened, else the message or traceback.
    """

    target: str
    seed: int
    result: str
    detail: str

    @property
    def ok(self):
        return self.result in (TOLD, REFUSED)


def run(folder, jobs):
    """Look at each (target, seed) in a process; after its end, the rest in another."""
    waiting = list(jobs)
    while waiting:
        with tempfile.NamedTemporaryFile() as answers:
            listed = json.dumps(waiting)
            done = run_python("-m", __name__, answers.name, listed, folder)
            told = [json.loads(line) for line in answers.read().splitlines()]
        for (target, seed), answer in zip(waiting, told, strict=False):
            yield Outcome(target, seed, *answer)
        waiting = waiting[len(told) :]
        if waiting:
            result = f"ended with {done.returncode}"
            detail = done.stderr[-3000:].decode(errors="replace")
            yield Outcome(*waiting.pop(0), result, detail)


def jobs_for(count):
    """Return about so many jobs, shared among the targets."""
    total = sum(share for *_, share in TARGETS.values())
    return [
        (target, seed)
        for target, (*_, share) in TARGETS.items()
        for seed in range(max(2, count * share // total))
    ]


def _serve():
    """Answer each job of the command line by a line; a hang ends the process."""
    answers, jobs, folder = sys.argv[1:]
    with Path(answers).open("w") as file:
        for target, seed in json.loads(jobs):
            signal.alarm(_SECONDS)
            with tempfile.TemporaryDirectory() as scratch:
                told = _looked_at(Path(folder), target, seed, Path(scratch))
            file.write(json.dumps(told) + "\n")
            file.flush()


def write_all(folder):
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
    tf.keras.utils.clear_session(free_memory=False)


def damaged(folder, target, seed, scratch):
    """Damage a file of a copy, and return what is to be looked at."""
    model, file, proto, _ = TARGETS[target]
    copy = scratch / model
    (shutil.copytree if file else shutil.copy)(folder / model, copy)
    victim = copy / file
    victim.write_bytes(_changed(victim.read_bytes(), target, proto, seed))
    return copy


def _changed(data, target, proto, seed):
    rng = random.Random(f"{target} {seed}")
    ways = [lambda: mutate(data, rng)[1], lambda: _with_lengths(data, rng)]
    if proto:
        ways += [lambda: mutate_fields(data, _proto(proto), rng)] * 2
    if target == "a.keras":
        ways += [lambda: _with_entries(data, rng)] * 3
    return rng.choice(ways)()


def _proto(name):
    from geutil.graph import protos

    return getattr(protos, name)


def _with_lengths(data, rng):
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


def _with_entries(data, rng):
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


def _json(config, rng):
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


def _looked_at(folder, target, seed, scratch):
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
    return (result, "") if target not in OPENED_TOO else _opened(path, result)


def _opened(path, result):
    """Open a damaged model, and with it each of its signatures."""
    from geutil import model

    try:
        try:
            opened = model.open(path)
        except model.ModelError as error:
            name = re.search(r"signature= as one of \['(\w+)'", str(error))
            if name is None:
                raise
            opened = model.open(path, signature=name[1])
        for name in opened.signatures:
            _ = opened.signatures[name].outputs
    except model.ModelError:
        return result, REFUSED
    except BaseException:
        return "raised another error", traceback.format_exc()[-3000:]
    return result, OPENED


def _peak_from_here():
    """Begin to measure the peak of resident memory anew; return what is resident."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(ln.split()[1]) for ln in lines if ln.startswith(key))


if __name__ == "__main__":
    from geutil.graph import protos  # noqa: F401
    from geutil.model.files import keras_files

    # Processes start slowly where others run.
    keras_files._SECONDS = 600
    # An absurd allocation fails at once, rather than fill the machine.
    limit = _status("VmSize") + _EXTRA_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _serve()
