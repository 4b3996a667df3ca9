"""What a journey comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

OK = "ok"
NONE = "none"
MISSED = "missed"
REFUSED = "refused"
ERROR = "error"
DIED = "died"
STATES = (OK, NONE, MISSED, REFUSED, ERROR, DIED)
"""All is as it must be; there is nothing to do; a figure misses its limit; geutil says
that it does not do this; another error; the process ended or took too long."""


@dataclass(frozen=True)
class Cell:
    """One journey of one model.

    Attributes:
        state: one of `STATES`.
        text: what the table shows.
        note: the whole message, where there is one.
    """

    state: str
    text: str = ""
    note: str = ""

    def as_dict(self) -> dict[str, str]:
        """Return it for a JSON file."""
        return asdict(self)


def cell(values: Mapping[str, Any]) -> Cell:
    """Return what `as_dict` was made of."""
    return Cell(values["state"], values["text"], values["note"])


def ok(text: str = OK) -> Cell:
    """All is as it must be."""
    return Cell(OK, text)


def none(reason: str) -> Cell:
    """There is nothing to do."""
    return Cell(NONE, reason)


def judged(is_ok: bool, text: str, note: str = "") -> Cell:
    """Return a figure that reaches its limit, or misses it."""
    return Cell(OK if is_ok else MISSED, text, note)


def raised(error: BaseException, is_own: bool) -> Cell:
    """Return what an error says: one of geutil's own classes is a refusal."""
    message = " ".join(str(error).split())
    state = REFUSED if is_own else ERROR
    return Cell(state, state, f"{type(error).__name__}: {message}")
