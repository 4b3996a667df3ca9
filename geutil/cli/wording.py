"""Errors in the words of the command: options, not arguments of Python.

Errors of the library name its functions and their arguments. Who types commands has
neither: a table says what they are called there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches

_PHRASES = (
    # What names an argument that the command has as an option.
    (r"pass signature= as one of", "pass --signature with one of"),
    (r"pass overwrite=True to replace it", "pass --force to replace it"),
    (
        (
            r"pass select_tf_ops=True to keep ops that TensorFlow Lite lacks, or "
            r"replace them"
        ),
        (
            "`geutil convert --tf-ops` keeps ops that TensorFlow Lite lacks; or "
            "replace them"
        ),
    ),
    (r"pass data= to calibrate with", "pass --data to calibrate with"),
    (r"rounds by data; pass data=", "rounds by data; pass --data"),
    (r"leave data= out", "leave --data out"),
    (r"pass a longer timeout", "pass a longer --timeout"),
    (r"(timeout|workers)=(\S+): ", r"--\1 \2: "),
    (r"pass scheme=, one of", "pass --scheme with one of"),
    (r"pass one of size=, noise= and accuracy=", "pass --size or --noise"),
    (r"leave layers=True out", "leave --layers out"),
    (r"calibrate with rounding='nearest'", "pass --rounding nearest"),
    (r"size=(\S+) is no budget", r"--size \1 is no budget"),
    (r"as a float from 0 to 1", "from 0% to 100%"),
    (r"pass keep=\['([^']*)'\]", r"pass --keep \1"),
    (r"(?:pass )?inputs= that it can take", "pass --data with inputs that it can take"),
    (r"pass inputs= as a mapping", "pass --feed input=tensor"),
    (r"name one in outputs=", "name one with --to"),
    (r"name it in inputs= too", "name it with --input too"),
    (r"with overrides=\{name: 'skip'\}", "with `geutil quantize --skip REGEX`"),
    (
        r"quantize with overrides=\{('[^']*'): 'skip'\}",
        r"pass `geutil quantize --skip \1`",
    ),
    (
        (
            r"Pass statistics=\{name: \(mean, variance\)\} with the names of their "
            r"variables, or keep=\[name\]"
        ),
        "Pass --keep NAME",
    ),
    # What names a function that is a command.
    (r"geutil\.model\.powers lists where", "`geutil inspect` lists where"),
    (
        r"save model\.rename\(inputs=\{'([^']*)': '([^']*)'\}\)",
        r"call it otherwise: `geutil rename --input '\1=\2'`",
    ),
    (
        r"rename\(outputs=\.\.\.\) or cut\(outputs=\.\.\.\) one of the models",
        "`geutil rename --to` or `geutil cut --to` one of the models",
    ),
    (
        r"rename\(inputs=\.\.\.\) one of the models",
        "`geutil rename --input` one of the models",
    ),
    (r"(?:with )?rename\((in|out)puts=\{\.\.\.\}\)", r"with `geutil rename`"),
    (r"(?:with )?model\.cut(?:\([^)]*\))?", "with `geutil cut`"),
    (
        r"with Model\.unroll\(\), once the model is opened with geutil\.model\.open",
        "with `geutil unroll`",
    ),
    (r"by Model\.unroll\(\)", "by `geutil unroll`"),
    (r"by Model\.set_batch_size\(1\)", "by `geutil batch-size`"),
    (r"pass max_ops= to allow more, or loops= to", "pass --max-ops, or --loop to"),
    (r"or pass loops= with those", "or pass --loop with those"),
    (
        r"loops=.*? selects none of the loops of .*?: ",
        "--loop selects none of the model's loops: ",
    ),
    (
        r"quantize it(?: first)?, with geutil\.quantize\.quantize\([^)]*\)",
        "quantize it first, with `geutil quantize`",
    ),
    (
        r"quantize it with quantize\(model, scheme='([^']*)'[^)]*\)",
        r"quantize it with `geutil quantize --scheme \1`",
    ),
    (
        r"with geutil\.quantize\.to_tflite\(model, scheme='([^']*)'\)",
        r"with `geutil quantize --scheme \1 -o FILE.tflite`",
    ),
    (
        r"quantize with activation_bits=8 and weight_bits up to 8",
        "pass --activation-bits 8 and --weight-bits up to 8",
    ),
    (r"call geutil\.quantize\.calibrate with data", "call `geutil calibrate --data`"),
    (
        r"write one with geutil\.quantize\.choose_bits\(\.\.\.\)\.save\(path\)",
        "`geutil bits -o` writes one",
    ),
    (
        r"by a mapping from the names of others to types",
        "by NAME=TYPE for each of the others",
    ),
    (
        r"was not made by geutil\.quantize\.to_int8",
        "was not made by `geutil quantize`",
    ),
    (
        r"(?:with |by )?geutil\.batchnorm(?:\.fold_batch_norms)?\b",
        "with `geutil fold`",
    ),
    (
        r"\(geutil\.model\.inspect, geutil\.report\.view and diff .* runs it\)",
        "(`geutil inspect`, `view` and `diff` read it, and `geutil run` runs it)",
    ),
    # Refused edits of TFLite files.
    (
        r"m\.find_tensors\(regex=\.\.\.\) looks for names",
        "`geutil ops --regex` looks for names",
    ),
    (r"strip\(metadata=\[[^]]*\]\)", "`geutil strip --metadata`"),
    (r" in inputs=, too", " with --input, too"),
    (r" out of inputs=", " out of --input"),
    (r"add it to ops=", "add it to --ops"),
    (
        r"rename\(tensors=\{'([^']*)': \.\.\.\}\)",
        r"`geutil rename --tensor '\1=NAME'`",
    ),
    (
        r"pass one of them as an object: it is in m\.find_tensors\(name=\.\.\.\)",
        "Python's `LiteFile.find_tensors` tells them apart",
    ),
    (r"pass a mapping from names to tensors", "give names: NAME=TENSOR"),
    # What takes Python, since the command has nothing for it.
    (r"pass shapes=\{[^}]*\}", "pass --size input=8,8,3"),
    (
        r"a \.keras, \.h5 or \.tflite file, a tf\.compat\.v1\..* or a Keras model",
        "or a .keras or .h5 file",
    ),
    (
        r"load it with tf\.saved_model\.load and pass one of its functions",
        "save it again with a signature",
    ),
    (
        r"pass samples=\{input: rows\}.*",
        "`Model.set_batch_size` in Python takes such samples, or skips the proof",
    ),
    (
        r"name (?:the inputs that|those whose) [a-z ]* with inputs=\[\.\.\.\]",
        "Python's `Model.set_batch_size` takes the names of those that have one",
    ),
    (r"pass one of these as tags=\.\.\.", "save it again with the tag 'serve'"),
    (
        r"read a checkpoint with model\.restore\(path\) or assign values",
        "save it again with values, or freeze it",
    ),
    (r"save it with format='saved_model'", "write a SavedModel"),
    (
        r"geutil\.model\.open takes their names: outputs=.*",
        "no command finds them in it: write a SavedModel",
    ),
    (r"name tensors with outputs=\[\.\.\.\]", "freeze the model with its outputs"),
)
"""Phrases of errors as regular expressions, and what the command says instead."""

_COMPILED = tuple((re.compile(phrase), words) for phrase, words in _PHRASES)


def in_words(message: str) -> str:
    """Return an error of the library in one line, in the words of the command.

    Example:
        >>> in_words("'net' exists; pass overwrite=True to replace it")
        "'net' exists; pass --force to replace it"
    """
    return translated(" ".join(message.split()))


def translated(text: str) -> str:
    """Return what the library says in the words of the command, line by line."""
    for phrase, words in _COMPILED:
        text = phrase.sub(words, text)
    return text


def meant(word: str, words: Sequence[str]) -> str:
    """Return which words are the nearest; nothing if none is near.

    Example:
        >>> meant("conv2d", ["Conv2D", "Relu"])
        '; did you mean Conv2D?'
    """
    near = list(_near(word, words))
    return f"; did you mean {', '.join(near[:3])}?" if near else ""


def _near(word: str, words: Sequence[str]) -> Iterator[str]:
    by_lower = {other.lower(): other for other in reversed(words)}
    near = get_close_matches(word.lower(), by_lower, n=3, cutoff=0.6)
    near += [low for low in by_lower if word.lower() in low and low not in near]
    return (by_lower[low] for low in near)
