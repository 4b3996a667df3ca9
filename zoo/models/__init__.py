"""The table of models, by family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from zoo.models import applications, functions, images, legacy, mixed, text, version1
from zoo.subject import Subject


@dataclass(frozen=True)
class Entry:
    """A row of the zoo.

    Attributes:
        name: what `--only` selects by.
        family: the heading it stands under.
        build: makes the model.
        needs: the package that it needs besides TensorFlow; "" for none.
    """

    name: str
    family: str
    build: Callable[[], Subject]
    needs: str = ""

    @property
    def missing(self) -> bool:
        """Whether the package it needs is not installed."""
        return bool(self.needs) and find_spec(self.needs) is None


def _entries(
    family: str, builders: Mapping[str, Callable[[], Subject]], needs: str = ""
) -> dict[str, Entry]:
    return {name: Entry(name, family, b, needs) for name, b in builders.items()}


MODELS = {
    **_entries("keras.applications", applications.BUILDERS),
    **_entries("keras_hub, images", images.BUILDERS, "keras_hub"),
    **_entries("keras_hub, text", text.BUILDERS, "keras_hub"),
    **_entries("keras_hub, other", mixed.BUILDERS, "keras_hub"),
    **_entries("tf_keras", legacy.BUILDERS, "tf_keras"),
    **_entries("TensorFlow 1", version1.BUILDERS),
    **_entries("functions", functions.BUILDERS),
}
