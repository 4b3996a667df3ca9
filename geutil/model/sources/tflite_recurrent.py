"""Recurrent ops of TFLite files as loops over time.

The kernels keep their state in the interpreter: a second run goes on where the first
one ended, unless `reset_all_variables` is called in between. The layers that they were
converted from begin each call with zeros, and so do these loops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from geutil.errors import TFLiteError
from geutil.model.sources.tflite_ops import ACTIVATIONS, Builder, Call

_EPSILON = 1e-8
"""Added to variances: that of TFLite's kernel (`tensor_utils.h`)."""
_GATES = ("input", "forget", "cell", "output")
# The places of an LSTM's inputs, in the order of the gates.
_FROM_INPUT, _FROM_STATE, _BIASES, _NORMS = 1, 5, 12, 20
_PEEPHOLES = {"input": 9, "forget": 10, "output": 11}
# Inputs 16 and 17 of the LSTM kernel: the projection and its bias (lstm.cc).
_PROJECTION = 16


def _matrix(call: Call, place: int) -> Any:
    return call.weights(place, [1, 0])


def _vector(call: Call, place: int) -> Any:
    return call.weights(place, [0])


def _by_time(call: Call, x: Any) -> Any:
    """Return a sequence with time as its first dimension, or the reverse."""
    return x if call.option("time_major", False) else tf.transpose(x, [1, 0, 2])


def _refuse_integers(call: Call) -> None:
    if call.source(0).quantization is not None:
        raise TFLiteError(
            "it computes in integers, with ranges inside that no tensor has; convert "
            "its model with float or dynamic-range recurrent layers"
        )


def _scanned(
    step: Callable[[Any, Sequence[Any]], Sequence[Any]],
    rows: Sequence[Any],
    state: Sequence[Any],
) -> Any:
    """Return the first part of a state after each step, stacked."""
    count = tf.shape(rows[0])[0]
    known = rows[0].shape[0]
    results = tf.TensorArray(
        tf.float32, known or count, element_shape=state[0].shape, dynamic_size=False
    )

    def body(time: Any, made: Any, *before: Any) -> Any:
        after = step([tf.gather(row, time) for row in rows], before)
        return (time + 1, made.write(time, after[0]), *after)

    _, results, *_ = tf.while_loop(
        lambda time, *_: time < (known or count), body, (0, results, *state)
    )
    stacked = results.stack()
    stacked.set_shape([known, *state[0].shape])
    return stacked


def _lstm(call: Call) -> Any:
    """Return the outputs of a layer of long short-term memory for each time."""
    _refuse_integers(call)
    if call.option("diagonal_recurrent_tensors", False):
        raise TFLiteError("its recurrent weights are diagonal")
    x = _by_time(call, call[0])
    gates = [gate for i, gate in enumerate(_GATES) if call.has(_FROM_INPUT + i)]
    place = {gate: _GATES.index(gate) for gate in gates}
    from_input = [tf.matmul(x, _matrix(call, _FROM_INPUT + place[g])) for g in gates]
    from_state = {g: _matrix(call, _FROM_STATE + place[g]) for g in gates}
    biases = {g: _vector(call, _BIASES + place[g]) for g in gates}
    norms = {
        g: _vector(call, _NORMS + place[g])
        for g in gates
        if call.has(_NORMS + place[g])
    }
    peepholes = {g: _vector(call, i) for g, i in _PEEPHOLES.items() if call.has(i)}
    projection = _matrix(call, _PROJECTION) if call.has(_PROJECTION) else None
    shift = _vector(call, _PROJECTION + 1) if call.has(_PROJECTION + 1) else None
    function = ACTIVATIONS[call.option("fused_activation_function", "TANH")]
    cell_clip, clip = call.option("cell_clip", 0.0), call.option("proj_clip", 0.0)

    def before(gate: str, given: Any, state: Any, cell: Any) -> Any:
        total = given + tf.matmul(state, from_state[gate])
        if gate in peepholes:
            total += cell * peepholes[gate]
        if gate in norms:
            mean, variance = tf.nn.moments(total, [-1], keepdims=True)
            total = (total - mean) * tf.math.rsqrt(variance + _EPSILON) * norms[gate]
        return total + biases[gate]

    def step(rows: Any, states: Sequence[Any]) -> Sequence[Any]:
        """Compute the state and the cell behind one row, as in kernels/lstm_eval.cc."""
        state, cell = states
        given = dict(zip(gates, rows, strict=True))
        forget = tf.sigmoid(before("forget", given["forget"], state, cell))
        taken = (
            tf.sigmoid(before("input", given["input"], state, cell))
            if "input" in given
            else 1.0 - forget
        )
        new = function(before("cell", given["cell"], state, cell))
        cell = _clipped(forget * cell + taken * new, cell_clip)
        output = tf.sigmoid(before("output", given["output"], state, cell))
        state = output * function(cell)
        if projection is not None:
            state = tf.matmul(state, projection)
            state = _clipped(state if shift is None else state + shift, clip)
        return state, cell

    batch = x.shape[1] or tf.shape(x)[1]
    units = from_state["cell"].shape[1]
    width = units if projection is None else projection.shape[1]
    state = [tf.zeros([batch, width]), tf.zeros([batch, units])]
    return _by_time(call, _scanned(step, from_input, state))


def _clipped(x: Any, limit: float) -> Any:
    return tf.clip_by_value(x, -limit, limit) if limit > 0.0 else x


def _rnn(call: Call) -> Any:
    """Return the outputs of a simple recurrent layer for each time."""
    _refuse_integers(call)
    x = _by_time(call, call[0])
    recurrent, bias = _matrix(call, 2), _vector(call, 3)
    function = ACTIVATIONS[call.option("fused_activation_function", "NONE")]
    given = tf.matmul(x, _matrix(call, 1)) + bias

    def step(rows: Any, states: Sequence[Any]) -> Sequence[Any]:
        return [function(rows[0] + tf.matmul(states[0], recurrent))]

    batch = x.shape[1] or tf.shape(x)[1]
    state = tf.zeros([batch, recurrent.shape[1]])
    return _by_time(call, _scanned(step, [given], [state]))


RECURRENT: Mapping[str, Builder] = {
    "UNIDIRECTIONAL_SEQUENCE_LSTM": _lstm,
    "UNIDIRECTIONAL_SEQUENCE_RNN": _rnn,
}
"""The builders for recurrent kinds."""
