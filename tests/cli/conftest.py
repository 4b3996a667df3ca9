"""A small model on disk, and the command run on it in this process."""

import contextlib
import io
import json
from dataclasses import dataclass

import numpy as np
import pytest
import tensorflow as tf

from geutil import model
from geutil.cli.commands import app
from geutil.cli.main import run


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Return a directory with a model and data for it."""
    place = tmp_path_factory.mktemp("cli")
    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(0)
    network = tf.keras.Sequential(
        [
            tf.keras.Input([8, 8, 3], name="image"),
            layers.Conv2D(4, 3, use_bias=False, name="first"),
            layers.BatchNormalization(name="norm"),
            layers.ReLU(name="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(5, name="last"),
        ]
    )
    random = np.random.default_rng(0)
    norm = network.get_layer("norm")
    norm.set_weights([random.uniform(0.5, 1.5, 4) for _ in range(4)])
    model.open(network).save(place / "net")
    samples = random.normal(size=(6, 8, 8, 3)).astype(np.float32)
    np.savez(place / "data.npz", image=samples)
    return place


@pytest.fixture(scope="session")
def planned(folder, tmp_path_factory):
    """Return the file of a plan of bits, and what the command printed."""
    path, said = tmp_path_factory.mktemp("plan") / "plan.json", io.StringIO()
    words = ["bits", folder / "net", "--data", folder / "data.npz", "--batch", 3]
    with contextlib.redirect_stdout(said):
        assert run(app, [*map(str, words), "--size", "90%", "-o", str(path)]) == 0
    return path, said.getvalue()


@dataclass
class Said:
    """What the command printed, and its exit code."""

    code: int
    out: str
    err: str


class Command:
    """Runs the command."""

    def __init__(self, capsys):
        self._capsys = capsys

    def __call__(self, *arguments):
        self._capsys.readouterr()
        code = run(app, [str(argument) for argument in arguments])
        said = self._capsys.readouterr()
        return Said(code, said.out, said.err)

    def done(self, *arguments, code=0):
        """Return what it printed; unless told else, it did what was asked for."""
        said = self(*arguments)
        assert said.code == code, said
        return said.out

    def tables(self, *arguments):
        """Return the rows of each table that it prints into a pipe, by their heads."""
        tables = self.done(*arguments).removesuffix("\n").split("\n\n")
        return [
            [dict(zip(heads, row, strict=True)) for row in rows]
            for heads, *rows in (
                [line.split("\t") for line in table.split("\n")] for table in tables
            )
        ]

    def json(self, *arguments, code=0):
        """Return what it tells programs."""
        return json.loads(self.done(*arguments, "--json", code=code))


@pytest.fixture
def geutil(capsys):
    return Command(capsys)
