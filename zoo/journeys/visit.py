"""A model on its journey: where it lies, and what plain TensorFlow made of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from zoo.models import Entry
from zoo.plain import built
from zoo.subject import Sample
from zoo.values import kept


@dataclass
class Visit:
    """One model in the process of geutil.

    Attributes:
        entry: its row.
        folder: what the process of plain TensorFlow wrote, and where to write.
    """

    entry: Entry
    folder: Path

    @cached_property
    def made(self) -> dict[str, Any]:
        """What plain TensorFlow makes of the model."""
        made: dict[str, Any] = kept(self.folder / "made.pickle")
        return made

    @property
    def sample(self) -> Sample:
        """The inputs that all is compared on."""
        sample: Sample = self.made["sample"]
        return sample

    @property
    def saved_model(self) -> Path:
        """The model, as plain TensorFlow saved it."""
        return self.folder / "saved_model"

    def build(self) -> Any:
        """Build the model again: with the same weights and seeds."""
        return built(self.entry)

    def place(self, name: str) -> Path:
        """Return where to save a model that plain TensorFlow is to load."""
        folder = self.folder / "saved"
        folder.mkdir(exist_ok=True)
        return folder / name
