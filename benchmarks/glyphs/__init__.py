"""Characters to read, and two trained networks that read them; see README.md."""

from benchmarks.glyphs.drawing import CHARACTERS, images
from benchmarks.glyphs.networks import accuracy, mobilenet, vit

__all__ = ["CHARACTERS", "accuracy", "images", "mobilenet", "vit"]
