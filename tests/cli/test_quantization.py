"""Commands on the way to int8."""

import json
import re
import shlex
import shutil

import numpy as np
import tensorflow as tf

from geutil import model, tflite
from geutil.quantize import BitPlan
from tests.interpreter import new_interpreter
from tests.settings import needs_eager
from tests.tflite.declared import buffer_of

NAME = "geutil_quantization"
"""The metadata in which a file keeps its ranges."""

pytestmark = [needs_eager]


def test_quantize_to_a_file_and_by_way_of_a_model(geutil, folder, tmp_path):
    data = ["--data", folder / "data.npz", "--batch", "3"]
    file = tmp_path / "net.tflite"
    method = ["--method", "min_max"]
    said = geutil.done("quantize", folder / "net", "-o", file, *data, *method)
    assert "coverage 1.000" in said
    interpreter = new_interpreter(file.read_bytes())
    assert interpreter.get_input_details()[0]["dtype"] == np.int8
    geutil.done("quantize", folder / "net", "-o", tmp_path / "q")
    again = tmp_path / "again.tflite"
    calibrated = geutil.json("calibrate", tmp_path / "q", "-o", again, *data)
    assert calibrated["batches"] == 2
    assert again.read_bytes()[4:8] == b"TFL3"


def test_weights_in_blocks_are_rounded_by_data(geutil, tmp_path):
    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(0)
    dense = [layers.Dense(40, name="wide"), layers.Dense(30, name="narrow")]
    network = tf.keras.Sequential([tf.keras.Input([64], name="x"), *dense])
    model.open(network).save(tmp_path / "net")
    file, simulated = tmp_path / "net.tflite", tmp_path / "q"
    scheme = ["--scheme", "dynamic_range_int4"]
    said = geutil.done("quantize", tmp_path / "net", "-o", file, *scheme)
    assert "weights 4 bits, symmetric, by blocks of 32" in said
    assert "not in blocks: its 40 inputs are no multiple of 32" in said
    said = geutil("inspect", file)
    assert "float32 with int4 weights (hybrid): 1" in said.out
    geutil.done("quantize", tmp_path / "net", "-o", simulated, *scheme)
    np.savez(tmp_path / "data.npz", x=np.eye(64, dtype=np.float32))
    data = ["--data", tmp_path / "data.npz", "--rounding", "gptq"]
    again = tmp_path / "again.tflite"
    said = geutil.json("calibrate", simulated, "-o", again, *data)
    assert len(said["in_blocks"]) == 1
    assert said["rounding"] == "gptq"
    assert all(layer["after"] <= layer["before"] for layer in said["layers"])
    assert "int4 weights (hybrid): 1" in geutil("inspect", again).out


def test_a_file_in_the_order_of_least_memory(geutil, folder, tmp_path):
    target = ["-o", tmp_path / "net.tflite", "--scheme", "float16"]
    order = ["--order", "least_memory"]
    said = geutil.done("quantize", folder / "net", *target, *order)
    assert "arena " in said
    assert "alive at the peak" in said
    told = geutil("quantize", folder / "net", *target, *order, "--force", "--json")
    assert "blob" not in json.loads(told.out)["order"]


def test_files_with_ends_of_other_types(geutil, folder, tmp_path):
    data, file = ["--data", folder / "data.npz"], tmp_path / "net.tflite"
    types = ["--input-type", "image=uint8", "--output-type", "float32"]
    geutil.done("quantize", folder / "net", *data, "-o", file, *types)
    run = new_interpreter(file.read_bytes()).get_signature_runner()
    ends = {**run.get_input_details(), **run.get_output_details()}
    assert [end["dtype"].__name__ for end in ends.values()] == ["uint8", "float32"]
    simulated = tmp_path / "simulated"
    geutil.done("quantize", folder / "net", *data, "-o", simulated)
    geutil.done("check", file, "--against", simulated, *data)
    again = tmp_path / "again.tflite"
    geutil.done("calibrate", simulated, *data, "-o", again, *types)
    # The one that `quantize` wrote has its ranges in it, too.
    first, second = tflite.open(file), tflite.open(again)
    first.strip(metadata=[NAME])
    second.strip()
    assert first.to_bytes() == second.to_bytes()


def noise(told):
    """Return the noise of layers; a SavedModel has an Identity for each output more."""
    layers = (e for e in told["layers"] if e["op_type"] != "Identity")
    return {e["op"]: (e["own"], e["accumulated"], e["file_steps"]) for e in layers}


def test_the_ranges_of_a_file_are_kept_in_it(geutil, folder, planned, tmp_path):
    data, file = ["--data", folder / "data.npz"], tmp_path / "net.tflite"
    # Weights that data rounds are no longer those of the network.
    nearest = ["--rounding", "nearest"]
    int16 = ["--keep-norms", "--scheme", "int16x8", *nearest]
    choices = (["--skip", "last"], ["--bits", planned[0], *nearest], int16)
    for number, options in enumerate(choices):
        simulated = tmp_path / f"simulated{number}"
        geutil.done("quantize", folder / "net", *data, *options, "-o", simulated)
        made = ["-o", file, "--force", *options]
        said = geutil.done("quantize", folder / "net", *data, *made)
        command = re.search("`geutil (check .* --layers)`", said)[1]
        found = geutil.json(*shlex.split(command), "--steps", "9")
        words = ["check", file, "--against", simulated, *data, "--layers"]
        expected = geutil.json(*words, "--steps", "9")
        assert noise(found) == noise(expected), options
        assert found["outputs"] == expected["outputs"]
        assert len(noise(found)) > 1
    stripped = tflite.open(file)
    # Damaged by somebody: no JSON, no object, a field more, an argument more, no pair.
    kept = json.loads(stripped.metadata[NAME].data.tobytes())
    for damaged in (
        "{",
        "[]",
        json.dumps(kept | {"more": 1}),
        json.dumps(kept | {"arguments": {"more": 1}}),
        json.dumps(kept | {"ranges": {"x": [1.0]}}),
    ):
        stripped.metadata[NAME] = buffer_of(damaged.encode())
        stripped.save(file, overwrite=True)
        refused = geutil("check", file, "--against", folder / "net", *data, "--layers")
        assert refused.code == 1
        assert f"'{NAME}' of the file are damaged" in refused.err
    stripped.strip(metadata=[NAME])
    stripped.save(file, overwrite=True)
    refused = geutil("check", file, "--against", folder / "net", *data, "--layers")
    assert "keeps no ranges: make it with `geutil quantize --data`" in refused.err
    data += ["--rounding", "gptq", "--force"]
    said = geutil.done("quantize", folder / "net", *data, "-o", file)
    assert "write the quantized model, too" in said
    assert NAME not in tflite.open(file).metadata


def test_data_are_told_of_before_a_model_is_opened(geutil, folder, tmp_path):
    with np.load(folder / "data.npz") as archive:
        images = archive["image"]
    np.savez(tmp_path / "two.npz", picture=images, label=np.zeros(6))
    # What cannot be opened is told after what is wrong with the data.
    shutil.copytree(folder / "net", tmp_path / "net")
    shutil.rmtree(tmp_path / "net" / "variables")
    target = ["-o", tmp_path / "q"]
    said = geutil("quantize", tmp_path / "net", *target, "--data", tmp_path / "two.npz")
    assert "name each array as its input: numpy.savez" in said.err
    np.save(tmp_path / "x.npy", np.uint8(images > 0))
    data = ["--data", tmp_path / "x.npy", "--method", "min_max"]
    said = geutil("quantize", folder / "net", *target, *data)
    assert said.code == 0
    assert said.err.count("0 to 255 is used as it is") == 1
    assert "given uint8, 0 to 1, mean" in said.out


def test_bits_are_chosen_and_taken(geutil, folder, planned, tmp_path):
    data = ["--data", folder / "data.npz", "--batch", "3"]
    (plan, chosen), page = planned, tmp_path / "bits.html"
    # 108 and 20 weights: the few are what can be halved last.
    assert "bytes of weights" in chosen
    least = ["--noise", "10", "--method", "min_max"]
    told = geutil.json("bits", folder / "net", *data, *least, "--html", page)
    assert {layer["bits"] for layer in told["layers"]} <= {4, 8}
    assert "<svg" in page.read_text()
    bits = {op: la.bits for la in BitPlan.load(plan).layers for op in la.ops}
    assert len(set(bits.values())) == 2
    said = geutil.json("quantize", folder / "net", "-o", tmp_path / "q", "--bits", plan)
    entries = said["quantized"]["quantized"]
    assert {e["op"]: e["weights"]["bits"] for e in entries if e["weights"]} == bits
    target = ["-o", tmp_path / "r", "--bits", plan]
    said = geutil("quantize", folder / "net", *target, "--scheme", "int16x8")
    assert "is a plan for the scheme int8" in said.err
    assert not (tmp_path / "r").exists()
