"""Constants that a file stores in few bytes, as arrays."""

import numpy as np
import pytest

from geutil import tflite
from geutil.errors import TFLiteError
from geutil.tflite import LiteTensor
from tests.interpreter import schema


def dense(tensor):
    """Return the array of a constant of a file, as its numbers."""
    file = tflite.LiteFile()
    file.add_input("x", "float32", [1])
    file.graphs[0].add_tensor(tensor)
    return file.constants[tensor.name]


def _sparse(shape, order, blocks, levels, values):
    """Return a sparse tensor: of each level the size, or where its rows end and lie."""
    names = schema
    tensor = LiteTensor("sparse", "float32", shape)
    tensor.value = np.zeros(shape, np.float32)
    tensor.buffer = type(tensor.buffer)(np.float32(values).view(np.uint8))
    record = names.SparsityParametersT()
    record.traversalOrder = np.int32(order)
    record.blockMap = np.int32(blocks) if blocks else None
    record.dimMetadata = []
    for level in levels:
        entry = names.DimensionMetadataT()
        if isinstance(level, int):
            entry.format, entry.denseSize = names.DimensionType.DENSE, level
        else:
            entry.format = names.DimensionType.SPARSE_CSR
            kind = names.SparseIndexVector.Int32Vector
            for name, numbers in zip(("Segments", "Indices"), level, strict=True):
                vector = names.Int32VectorT()
                vector.values = np.int32(numbers)
                setattr(entry, f"array{name}", vector)
                setattr(entry, f"array{name}Type", kind)
        record.dimMetadata.append(entry)
    tensor.record.sparsity = record
    return tensor


# The examples of the format's definition: the matrix has 1 to 4 where they are.
MATRIX = np.float32([[1, 0, 2, 3], [0, 4, 0, 0], [0, 0, 5, 0], [0, 0, 0, 6]])


@pytest.mark.parametrize("is_read", [False, True], ids=["made", "read"])
@pytest.mark.parametrize(
    ("order", "levels", "values"),
    [
        ([0, 1], [4, ([0, 3, 4, 5, 6], [0, 2, 3, 1, 2, 3])], [1, 2, 3, 4, 5, 6]),
        ([1, 0], [4, ([0, 1, 2, 4, 6], [0, 1, 0, 2, 0, 3])], [1, 4, 2, 5, 3, 6]),
    ],
    ids=["rows", "columns"],
)
def test_rows_or_columns_are_filled_in(order, levels, values, is_read):
    tensor = _sparse([4, 4], order, [], levels, values)
    if is_read:
        file = tflite.LiteFile()
        graph = tflite.LiteGraph("main")
        file.graphs.append(graph)
        graph.add_tensor(tensor)
        (tensor,) = tflite.open(file.to_bytes()).tensors
    np.testing.assert_array_equal(dense(tensor), MATRIX)


def test_blocks_are_filled_in():
    levels = [2, ([0, 2, 3], [0, 1, 1]), 2, 2]
    values = [1, 0, 0, 4, 2, 3, 0, 0, 5, 0, 0, 6]
    tensor = _sparse([4, 4], [0, 1, 2, 3], [0, 1], levels, values)
    np.testing.assert_array_equal(dense(tensor), MATRIX)


def test_what_does_not_fit_together_is_refused():
    rows = [4, ([0, 3, 4, 5, 6], [0, 2, 3, 1, 2, 3])]
    with pytest.raises(TFLiteError, match="has 5 values for 6 places"):
        dense(_sparse([4, 4], [0, 1], [], rows, [1, 2, 3, 4, 5]))
    with pytest.raises(TFLiteError, match="outside its shape"):
        dense(_sparse([4, 3], [0, 1], [], rows, [1, 2, 3, 4, 5, 6]))
    with pytest.raises(TFLiteError, match="sparse in 1 dimensions, and has 2"):
        dense(_sparse([4, 4], [0], [], [4], [1, 2, 3, 4]))


def test_strings_and_constants_without_elements_are_those_of_the_model():
    words = LiteTensor("words", "string", [2])
    ends = np.int32([2, 16, 19, 20]).tobytes()
    words.buffer = type(words.buffer)(np.frombuffer(ends + b"onet", np.uint8))
    file = tflite.LiteFile()
    place = file.add_input("place", "int32", [1])
    file.graphs[0].add_tensor(words)
    file.graphs[0].add_tensor(nothing := LiteTensor("shape", "int32", [0]))
    word = file.add("GATHER", [words, place], name="word")
    one = file.add("RESHAPE", [place, nothing], name="one", shape=())
    file.set_outputs([word, one])
    found = file.to_model().run(place=[1])
    assert found["word"].tolist() == [b"t"]
    assert found["one"].shape == ()


def test_a_constant_that_a_kernel_fills_in_is_not_written():
    rows = [4, ([0, 3, 4, 5, 6], [0, 2, 3, 1, 2, 3])]
    tensor = _sparse([4, 4], [0, 1], [], rows, [1, 2, 3, 4, 5, 6])
    file = tflite.LiteFile()
    x = file.add_input("x", "float32", [4, 4])
    file.graphs[0].add_tensor(tensor)
    whole = file.add("DENSIFY", tensor, name="whole", dtype="float32", shape=[4, 4])
    file.set_outputs(file.add("ADD", [x, whole], name="y"))
    with pytest.raises(TFLiteError, match="without its zeros, which <LiteOp DENSIFY"):
        file.constants["sparse"] = MATRIX
    assert tensor.is_sparse
