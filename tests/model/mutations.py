"""Damage as disks, networks and editors do it, and within the fields of a proto.

Flipped bits mostly break the framing, and the parser finds that. Changed fields go
deeper: the proto can still be parsed.
"""


def mutate(data, rng):
    """Return what was done to `data`, and the result."""
    while True:
        kind = rng.choice(list(_MUTATIONS))
        changed = _MUTATIONS[kind](bytearray(data), rng)
        if changed != data:  # Two equal bytes may have been swapped.
            return kind, changed


def _truncate(data, rng):
    return bytes(data[: rng.randrange(len(data))])


def _flip_bit(data, rng):
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _flip_bits(data, rng):
    for _ in range(rng.randint(2, 20)):
        _flip_bit(data, rng)
    return bytes(data)


def _delete(data, rng):
    start, end = _chunk(data, rng)
    del data[start:end]
    return bytes(data)


def _duplicate(data, rng):
    start, end = _chunk(data, rng)
    data[start:start] = data[start:end]
    return bytes(data)


def _swap(data, rng):
    i, j = (rng.randrange(len(data)) for _ in range(2))
    data[i], data[j] = data[j], data[i]
    return bytes(data)


def _set_byte(data, rng):
    data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
    return bytes(data)


def _chunk(data, rng):
    start = rng.randrange(len(data))
    return start, min(len(data), start + rng.choice((1, 2, 8, 64, 512)))


_MUTATIONS = {
    "truncated": _truncate,
    "one bit flipped": _flip_bit,
    "bits flipped": _flip_bits,
    "chunk deleted": _delete,
    "chunk duplicated": _duplicate,
    "bytes swapped": _swap,
    "byte set": _set_byte,
}


# -- within the fields of a proto ------------------------------------------------------

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


def mutate_fields(data, message_class, rng):
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
