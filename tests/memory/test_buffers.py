"""The chunks of TensorFlow's best-fit allocator."""

import json
import os
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from geutil.memory import Node, Program, simulate
from geutil.memory.buffers import ALIGNMENT, Chunks, replay
from geutil.memory.program import Allocator, Device
from tests.processes import run_python

MB = 1 << 20


def test_a_rest_is_split_off_if_it_is_as_large_as_the_chunk():
    chunks = Chunks(Allocator())
    first, wall = chunks.allocate(3000), chunks.allocate(256)
    chunks.free(first)
    # 3,072 bytes are free: twice 1,536, and less than twice 1,792.
    assert chunks.allocate(1536).size == 1536
    assert chunks.allocate(1024).size == 1536
    assert chunks.in_use == 3072 + wall.size


def test_the_smallest_chunk_that_is_large_enough_is_taken():
    chunks = Chunks(Allocator())
    large, _, small, _ = (chunks.allocate(size) for size in (4096, 256, 2048, 256))
    chunks.free(large)
    chunks.free(small)
    assert chunks.allocate(2000).address == small.address
    assert chunks.extent == 4096 + 256 + 2048 + 256


def test_free_neighbours_become_one_chunk():
    chunks = Chunks(Allocator())
    parts = [chunks.allocate(1024) for _ in range(3)]
    for part in (parts[0], parts[2], parts[1]):
        chunks.free(part)
    assert chunks.allocate(3072).address == parts[0].address
    assert chunks.extent == 3072


def test_growing_memory_has_regions_that_nothing_joins():
    chunks = Chunks(Allocator(grows=True))
    first, second = chunks.allocate(2 * MB), chunks.allocate(3 * MB)
    # Regions of 2 and 4 MiB; the rest of the second is smaller than what it holds.
    assert (first.size, second.size, chunks.extent) == (2 * MB, 4 * MB, 6 * MB)
    chunks.free(first)
    chunks.free(second)
    chunks.allocate(6 * MB)
    assert chunks.extent == 14 * MB


@given(
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 1 << 24)), max_size=60),
)
def test_chunks_never_overlap_and_nothing_is_lost(grows, steps):
    chunks = Chunks(Allocator(grows))
    live = {}
    for key, size in steps:
        if key in live:
            chunks.free(live.pop(key)[0])
        else:
            live[key] = chunks.allocate(size), size
        spans = sorted((c.address, c.address + c.size) for c, _ in live.values())
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert all(c.size >= size for c, size in live.values())
        assert all(c.size % ALIGNMENT == 0 for c, _ in live.values())
        assert chunks.in_use == sum(c.size for c, _ in live.values())
        assert not spans or spans[-1][1] <= chunks.extent
    for chunk, _ in live.values():
        chunks.free(chunk)
    if not grows:
        # All is one chunk again.
        assert chunks.allocate(chunks.extent + 1).address == 0


def test_what_is_there_before_is_not_in_use():
    moves = [([(0, 1000)], []), ([(1, 500)], [0, 1])]
    taken = replay(Allocator(), [10_000], moves)
    assert taken.in_use == [1024, 1536]
    assert taken.extent == 10_240 + 1536


def test_a_program_on_a_device_of_chunks_takes_whole_ones():
    nodes = [
        Node("a", "MatMul", outputs=[0], temporary=300),
        Node("b", "MatMul", inputs=[0], outputs=[1]),
    ]
    plain = Program(nodes, sizes=[1000, 1000], fetched=[1])
    on_gpu = Program(nodes, [1000, 1000], [1], device=Device("GPU", False, Allocator()))
    assert simulate(plain).resident == simulate(on_gpu).peak == 2000
    assert simulate(on_gpu).resident == simulate(on_gpu).extent == 2048
    assert simulate(plain).extent is None
    assert simulate(on_gpu).timeline().resident == 2048


EAGER = """
import json, random
import tensorflow as tf
from geutil.memory.program import Allocator
from geutil.memory.buffers import Chunks

def in_use():
    return tf.config.experimental.get_memory_info("CPU:0")["current"]

def make(size):
    return tf.raw_ops.Empty(shape=shapes[size], dtype=tf.uint8)

rows = random.Random(0)
sizes = [rows.randrange(4 << 20, 60 << 20) for _ in range(150)]
shapes = {size: tf.constant([size]) for size in [100 << 20, *sizes]}
chunks, live, wrong = Chunks(Allocator(grows=True)), [], []
# A region larger than all before it: what came before cannot matter.
first, chunk = make(100 << 20), chunks.allocate(100 << 20)
del first
chunks.free(chunk)
before = in_use() - chunks.in_use
for step, size in enumerate(sizes):
    while len(live) > 6 or (live and rows.random() < 0.4):
        tensor, chunk = live.pop(rows.randrange(len(live)))
        del tensor
        chunks.free(chunk)
    live.append((make(size), chunks.allocate(size)))
    if in_use() - before != chunks.in_use:
        wrong.append((step, size, in_use() - before, chunks.in_use))
print(json.dumps([len(wrong), wrong[:3]]))
"""


def test_the_chunks_are_those_of_tensorflows_own_allocator():
    # TensorFlow's CPU can have the allocator of its GPUs, which grows.
    environment = {**os.environ, "TF_CPU_ALLOCATOR_USE_BFC": "1"}
    child = run_python("-c", EAGER, environment=environment)
    assert child.returncode == 0, child.stderr.decode()[-2000:]
    assert json.loads(child.stdout) == [0, []]
