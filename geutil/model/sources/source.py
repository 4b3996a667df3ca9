"""What a source gives: signatures to be opened, and what they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from geutil.model.errors import ModelError
from geutil.model.holdings import Holdings
from geutil.model.programs.program import Program

DEFAULT_SIGNATURE = "serving_default"


@dataclass
class Source:
    """A source of models.

    Attributes:
        what: the source in words, for messages.
        signatures: for each signature what makes its program.
        holdings: what the signatures share.
        functions: for each signature the function that can be saved as it is, when
            nobody has opened the signature.
    """

    what: str
    signatures: dict[str, Callable[[], Program]]
    holdings: Holdings = field(default_factory=Holdings)
    functions: dict[str, Any] = field(default_factory=dict)

    def chosen(self, signature: str | None) -> str:
        """Return the signature that is asked for, or the one that is meant.

        Raises:
            ModelError: there is none of that name; or none is asked for and there are
                several without a `serving_default`, or none at all.
        """
        known = sorted(self.signatures)
        if signature is not None:
            if signature not in self.signatures:
                raise ModelError(
                    f"{self.what} has no signature '{signature}'; it has {known}"
                )
            return signature
        if DEFAULT_SIGNATURE in self.signatures:
            return DEFAULT_SIGNATURE
        if len(known) == 1:
            return known[0]
        if not known:
            raise ModelError(
                f"{self.what} has no signatures; load it with tf.saved_model.load and "
                "pass one of its functions"
            )
        raise ModelError(
            f"{self.what} has several signatures and no '{DEFAULT_SIGNATURE}'; pass "
            f"signature= as one of {known}"
        )
