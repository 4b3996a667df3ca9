"""Damage within the fields of a proto, so that it can still be parsed.

Flipped bits mostly break the framing, and the parser finds that. These go deeper.
"""

from __future__ import annotations

import random

_INTEGERS = (
    0,
    1,
    -1,
    2,
    7,
    255,
    2**20 + 1,
    2**31 - 1,
    -(2**31),
    2**40,
    2**62,
    -(2**63),
)
_TYPES = (*range(36), 77, *range(101, 110))


def mutate_fields(data: bytes, message_class, rng: random.Random) -> bytes:
    """Change one to three fields somewhere in the proto that `data` holds."""
    message = message_class.FromString(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(message))
        owner, field = rng.choice(places)
        others = [o for o, f in places if f is field]
        _change(owner, field, rng.choice(others), rng)
    return message.SerializeToString(deterministic=True)


def _places(message):
    """Yield each message with each of its fields that are set."""
    stack = [message]
    while stack:
        owner = stack.pop()
        for field, value in owner.ListFields():
            yield owner, field
            if field.message_type is None:
                continue
            if _is_map(field):
                if field.message_type.fields_by_name["value"].message_type:
                    stack += [value[key] for key in sorted(value)]
            elif _repeated(field):
                stack += value
            else:
                stack.append(value)


def _change(owner, field, other, rng):
    name = field.name
    if rng.random() < 0.1:
        owner.ClearField(name)
    elif _is_map(field):
        _change_map(getattr(owner, name), rng)
    elif _repeated(field):
        _change_list(getattr(owner, name), getattr(other, name), field, rng)
    elif field.message_type:
        _copy(getattr(other, name), getattr(owner, name))
    else:
        try:
            setattr(owner, name, _scalar(getattr(owner, name), other, field, rng))
        except (ValueError, TypeError):  # Out of the field's range.
            owner.ClearField(name)


def _change_map(entries, rng):
    first, second = (rng.choice(sorted(entries)) for _ in range(2))
    if isinstance(entries[first], str):
        entries[first] = entries[second]
    elif first == second:
        del entries[first]
    else:
        _copy(entries[second], entries[first])


def _change_list(values, others, field, rng):
    place = rng.randrange(len(values))
    action = rng.choice(("delete", "repeat", "change", "change"))
    if action == "delete":
        del values[place]
    elif action == "repeat":
        values.append(values[place])
    elif field.message_type:
        _copy(rng.choice(list(others)), values[place])
    else:
        try:
            values[place] = _value(values[place], rng.choice(list(others)), field, rng)
        except (ValueError, TypeError):
            del values[place]


def _scalar(value, other, field, rng):
    return _value(value, getattr(other, field.name), field, rng)


def _value(value, other, field, rng):
    if field.enum_type is not None:
        return rng.choice(_TYPES)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((*_INTEGERS, value ^ (1 << rng.randrange(31)), value + 1))
    if isinstance(value, float):
        return rng.choice((0.0, -1.0, 1e38, float("inf"), float("nan")))
    if isinstance(value, bytes):
        return rng.choice((other, b"", value[:-1], value * 2, b"\xff" * 8))
    return rng.choice((other, other, other, value + "x", value[:-1], ""))


def _copy(source, target):
    # Either may lie within the other, which protobuf's own copying does not survive.
    target.ParseFromString(source.SerializeToString(deterministic=True))


def _repeated(field):
    # Newer protobuf has a property for it, older the label.
    flag = getattr(field, "is_repeated", None)
    return field.label == field.LABEL_REPEATED if flag is None else flag


def _is_map(field):
    kind = field.message_type
    return kind is not None and kind.GetOptions().map_entry
