"""Programs of this folder: processes of their own, for their devices and servers."""

import contextlib
import os
import pickle
import signal
import socket
import sys
import tempfile
from pathlib import Path

import tensorflow as tf

REUSE = {"TF_GRPC_REUSE_PORT": "1"}
"""Lets servers of TensorFlow listen on a port that `held_ports` holds."""
LIMIT = 600
"""Seconds after which a process hangs."""


@contextlib.contextmanager
def held_ports(count):
    """Yield ports of this machine that no other process is given meanwhile."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for held in sockets:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind(("127.0.0.1", 0))
        yield [held.getsockname()[1] for held in sockets]


def results_of(program, *arguments):
    """Return the results of a program of this folder."""
    # Not in the program, which would take time to import pytest.
    from tests.processes import run_python

    with tempfile.NamedTemporaryFile() as file:
        done = run_python(
            "-m",
            f"tests.distribute.{program}",
            file.name,
            *arguments,
            environment={**os.environ, **REUSE},
        )
        assert done.returncode == 0, (done.stdout + done.stderr).decode()[-3000:]
        return pickle.loads(Path(file.name).read_bytes())


def start(main):
    """Call `main` with the arguments of this program, and keep its results."""
    signal.alarm(LIMIT)
    Path(sys.argv[1]).write_bytes(pickle.dumps(main(*sys.argv[2:])))


def mirrored():
    """Return strategies of one and of two devices of this process."""
    split_cpu()
    return {
        kind: tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(count)])
        for count, kind in enumerate(("one", "two"), 1)
    }


def split_cpu():
    """Let the processor be two devices."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )


def distributed(strategy, values):
    """Return a batch, of which each replica has its part."""

    def part(context):
        size = len(values) // context.num_replicas_in_sync
        start = context.replica_id_in_sync_group * size
        return tf.constant(values[start : start + size])

    return strategy.experimental_distribute_values_from_function(part)
