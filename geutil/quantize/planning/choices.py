"""The caller's choices, op by op."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from geutil.errors import ArgumentTypeError, QuantizeError
from geutil.graph.types import Operation, is_in_scope, is_op, type_name
from geutil.quantize.planning.int8_kernels import ACTIVATIONS
from geutil.quantize.spec import Spec, check_bits, check_decay
from geutil.select.conversions import can_be_regex, make_regex

SKIP = "skip"
Override = Spec | str


@dataclass(frozen=True, eq=False)
class QuantizeChoices:
    """How ops are quantized; see `geutil.quantize.quantize`.

    Raises:
        QuantizeError: a number is out of range, or a name is not known.
        ArgumentTypeError: an argument is of another type.
    """

    weight_bits: int = 8
    activation_bits: int = 8
    symmetric_weights: bool = True
    per_channel: bool = True
    ema_decay: float = 0.999
    scope: str | None = None
    overrides: Mapping[Any, Override] = field(default_factory=dict)
    activations: frozenset[str] = ACTIVATIONS
    initial: tuple[float, float] = (-6.0, 6.0)
    stands_for: Mapping[Operation, Operation] = field(default_factory=dict)
    """Ops that were made to stand in for others, whose overrides are for them."""

    def __post_init__(self) -> None:
        """Refuse what cannot be done."""
        check_bits(self.weight_bits, "weight_bits")
        check_bits(self.activation_bits, "activation_bits")
        check_decay(self.ema_decay)
        for name in sorted(self.activations - ACTIVATIONS):
            raise QuantizeError(
                f"'{name}' is no activation that is known; these are "
                f"{', '.join(sorted(ACTIVATIONS))}"
            )
        for key, value in self.overrides.items():
            if not is_op(key) and not can_be_regex(key):
                raise ArgumentTypeError(
                    "overrides are for ops, or regular expressions of their names, "
                    f"not for {type_name(key)}"
                )
            if value != SKIP and not isinstance(value, Spec):
                raise ArgumentTypeError(
                    f"an override is a geutil.quantize.Spec or '{SKIP}', not {value!r}"
                )

    def in_scope(self, op: Operation) -> bool:
        """Tell whether an op is in the scope that is asked for."""
        return is_in_scope(op.name, self.scope)

    def matcher(self, ops: Iterable[Operation]) -> Overrides:
        """Return what finds the override of an op.

        Raises:
            QuantizeError: an override is for none of `ops`.
        """
        return Overrides(self, list(ops))


class Overrides:
    """The overrides of the ops of a graph.

    Attributes:
        specs: those that are no "skip": the name of each, what it asks for, and the ops
            that it counts for; none where others came first.

    Cost: linear in ops times regular expressions, once.
    """

    def __init__(self, choices: QuantizeChoices, ops: list[Operation]) -> None:
        self._choices = choices
        self._found: dict[Operation, Override] = {}
        self.specs: list[tuple[str, Spec, list[Operation]]] = []
        # An op, and what overrides may call it.
        called = [(op, (op, choices.stands_for.get(op, op))) for op in ops]
        for key, value in choices.overrides.items():
            matched = [op for op, others in called if _is_meant(key, others)]
            name = getattr(key, "name", getattr(key, "pattern", key))
            if not matched:
                raise QuantizeError(
                    f"the override '{name}' is for no op that computes with data; "
                    "overrides take ops of the graph, or regular expressions that are "
                    "searched for in their names"
                )
            new = [op for op in matched if op not in self._found]
            self._found.update(dict.fromkeys(new, value))
            if isinstance(value, Spec):
                self.specs.append((name, value, new))

    def asked(self, op: Operation) -> bool:
        """Tell whether an op is to be quantized in a way of its own."""
        return isinstance(self._found.get(op), Spec)

    def skipped(self, op: Operation) -> bool:
        """Tell whether an op is not to be quantized."""
        return self._found.get(op) == SKIP

    def spec(self, ops: Iterable[Operation]) -> Spec:
        """Return how a group of ops is quantized, with all choices filled in.

        Raises:
            QuantizeError: overrides for ops of the group contradict each other.
        """
        special = self._special(list(ops))
        base = self._choices
        return Spec(
            _first(special.weight_bits, base.weight_bits),
            _first(special.activation_bits, base.activation_bits),
            _first(special.symmetric_weights, base.symmetric_weights),
            _first(special.per_channel, base.per_channel),
            special.range,
            _first(special.ema_decay, base.ema_decay),
        )

    def _special(self, ops: list[Operation]) -> Spec:
        """Return what overrides say of a group of ops, taken together."""
        given: dict[str, tuple[Operation, Any]] = {}
        for op in ops:
            spec = self._found.get(op)
            for name, value in chosen(spec) if isinstance(spec, Spec) else ():
                other, before = given.setdefault(name, (op, value))
                if before != value:
                    raise QuantizeError(
                        f"'{other.name}' and '{op.name}' are computed by one kernel, "
                        f"and overrides ask for {name}={before} and {name}={value}; "
                        "ask for one of them"
                    )
        return Spec(**{name: value for name, (_, value) in given.items()})


def chosen(spec: Spec) -> list[tuple[str, Any]]:
    """Return what a Spec asks for, by the names of its fields."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    if spec.range is not None:
        values["range"] = tuple(float(end) for end in spec.range)
    return [(name, value) for name, value in values.items() if value is not None]


def _first(special: Any, otherwise: Any) -> Any:
    return otherwise if special is None else special


def _is_meant(key: Any, ops: Iterable[Operation]) -> bool:
    if is_op(key):
        return key in ops
    regex = make_regex(key)
    return any(regex.search(op.name) for op in ops)
