"""Samples of models that do more than compute, each harmless: it touches one marker.

`SAMPLES` names ops; `save(sample, folder, marker)` writes one as a SavedModel. Run, a
sample of "read files" or "list folders" needs the marker, made as `PREPARED` says; the
others make the marker, or something that begins with its name. What cannot be run here
is in `NOT_RUN`, with the reason. `HIDDEN` has ways in which ops hide in graphs: in
branches, loops, datasets. `FILES` has those of files: of SavedModels, Keras and TFLite.
"""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf

from testdata.powers.common import FileSample, Sample
from testdata.powers.graph_files import GRAPH_FILES
from testdata.powers.hidden import HIDDEN
from testdata.powers.keras_files import KERAS_FILES
from testdata.powers.reading import PREPARED, READING
from testdata.powers.writing import NOT_RUN, WRITING

__all__ = ["FILES", "HIDDEN", "NOT_RUN", "PREPARED", "SAMPLES", "save"]
SAMPLES = WRITING | READING
FILES: dict[str, FileSample] = KERAS_FILES | GRAPH_FILES


def save(sample: Sample, folder: Path, marker: Path) -> None:
    """Write a sample as a SavedModel."""
    module = tf.Module()
    spec = [tf.TensorSpec([], name="x")]
    module.f = tf.function(
        lambda x: {"y": sample(str(marker), x)}, input_signature=spec
    )
    signature = module.f.get_concrete_function()
    tf.saved_model.save(module, str(folder), {"serving_default": signature})
