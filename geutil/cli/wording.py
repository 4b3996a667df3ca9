"""The vocabulary of the command: options and commands in place of Python's words."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

VOCABULARY: Mapping[str, str] = MappingProxyType(
    {
        # Parameters that are options.
        "activation_bits=": "--activation-bits",
        "as a float from 0 to 1": "from 0% to 100%",
        "by a mapping from the names of others to types": (
            "by NAME=TYPE for each of the others"
        ),
        "compare(inputs=": "--data with inputs",
        "data=": "--data",
        "in inputs=": "with --input",
        "in outputs=": "with --to",
        "keep=": "--keep",
        "layers=": "--layers",
        "loops=": "--loop",
        "max_ops=": "--max-ops",
        "one of size=": "--size or --noise",
        "ops=": "--ops",
        "overrides=": "`geutil quantize --skip {}`",
        "overwrite=": "--force",
        "pass a mapping from names to tensors": "give names: NAME=TENSOR",
        "pass inputs=": "pass --feed input=tensor",
        "pass statistics=": "pass --keep NAME",
        "rounding=": "--rounding",
        "scheme=": "--scheme",
        "select_tf_ops=": "`geutil convert --tf-ops`",
        "shapes=": "--size input=8,8,3",
        "signature=": "--signature",
        "size=": "--size",
        "timeout=": "--timeout",
        "weight_bits": "--weight-bits",
        "workers=": "--workers",
        # Functions that are commands.
        "Model.set_batch_size(1)": "`geutil batch-size`",
        "Model.unroll()": "`geutil unroll`",
        "cut(outputs=": "`geutil cut --to`",
        "geutil.batchnorm.fold_batch_norms": "`geutil fold`",
        "geutil.model.powers": "`geutil inspect`",
        "geutil.quantize.calibrate": "`geutil calibrate`",
        "geutil.quantize.choose_bits(...).save(path)": "`geutil bits -o`",
        "geutil.quantize.quantize(model, is_training=": "`geutil quantize`",
        "geutil.quantize.to_tflite(model, scheme=": (
            "`geutil quantize --scheme {} -o FILE.tflite`"
        ),
        "it is of another model, or was not made by geutil.quantize.to_int8": (
            "it is of another model, or was not made by `geutil quantize`"
        ),
        "m.find_tensors(regex=": "`geutil ops --regex`",
        "model.cut": "`geutil cut`",
        "model.cut(inputs=": "`geutil cut --input`",
        "quantize(model, scheme=": "`geutil quantize --scheme {}`",
        "rename(inputs=": "`geutil rename --input`",
        "rename(outputs=": "`geutil rename --to`",
        "rename(tensors=": "`geutil rename --tensor '{}=NAME'`",
        "save model.rename(inputs=": "call it otherwise: `geutil rename --input '{}'`",
        "strip(metadata=": "`geutil strip --metadata`",
        "tflite.open": (
            "`geutil inspect`, `view` and `diff` read it, and `geutil run` runs it"
        ),
        # Remedies that the command lacks, and others that it has.
        "geutil.model.open takes their names: outputs=": (
            "no command finds them in it: write a SavedModel"
        ),
        "name tensors with outputs=": "freeze the model with its outputs",
        "name those whose first axis is the batch with inputs=": (
            "Python's `Model.set_batch_size` takes their names"
        ),
        "open": (
            "a SavedModel directory, a .pb or .pbtxt file with a GraphDef, or a .keras "
            "or .h5 file"
        ),
        "pass one of them as an object: it is in m.find_tensors(name=": (
            "Python's `LiteFile.find_tensors` tells them apart"
        ),
        "pass one of these as tags=": "save it again with the tag 'serve'",
        "pass samples=": (
            "`Model.set_batch_size` in Python takes such samples, or skips the proof"
        ),
        "pass verify=": "`Model.set_batch_size` in Python can skip the proof",
        "read a checkpoint with model.restore(path) or assign values": (
            "save it again with values, or freeze it"
        ),
        "save it with format=": "write a SavedModel",
        "saved_model.load": "save it again with a signature",
    }
)
"""Words of the command by the keys of `geutil.errors.Words`."""
