"""The signatures of a model, opened when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from geutil.model.holdings import Holdings
from geutil.model.programs.materializing import Parts, materialize
from geutil.model.sources.source import Source

M = TypeVar("M")


class Signatures(Mapping[str, M], Generic[M]):
    """The signatures by name; each is a model that shares the variables.

    Args:
        source: where signatures that nobody has opened come from.
        inline: whether calls are inlined when a signature is opened.
        opened: the signatures that are open.
        names: all names, in order.
        make: makes a model of parts, its name, its signatures and its holdings.
    """

    def __init__(
        self,
        source: Source,
        inline: bool,
        opened: Mapping[str, M],
        names: tuple[str, ...],
        make: Callable[[Parts, str, Signatures[M], Holdings], M],
    ) -> None:
        self._source = source
        self._inline = inline
        self._opened = dict(opened)
        self._names = names
        self._make = make

    def __getitem__(self, name: str) -> M:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._opened:
            program = self._source.signatures[name]()
            parts = materialize(program, inline=self._inline, what=self._source.what)
            self.new(name, parts, self._source.holdings)
        return self._opened[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"Signatures({list(self._names)})"

    def new(self, name: str, parts: Parts, holdings: Holdings) -> M:
        """Make a model of parts, and take it in as the signature of that name."""
        model = self._make(parts, name, self, holdings)
        self.take_in(name, model)
        return model

    def take_in(self, name: str, model: M) -> None:
        """Take a model in as the signature of that name."""
        self._opened[name] = model
        if name not in self._names:
            self._names = (*self._names, name)

    def opened(self) -> dict[str, M]:
        """Return the signatures that are open."""
        return dict(self._opened)

    def unopened(self) -> dict[str, Any]:
        """Return the functions of signatures that nobody has opened.

        Signatures that have no function yet are opened on the way.
        """
        for name in self._names:
            if name not in self._opened and name not in self._source.functions:
                self[name]
        closed = [name for name in self._names if name not in self._opened]
        return {name: self._source.functions[name] for name in closed}

    def vacated(self, name: str, new: str) -> Signatures[M]:
        """Return the other signatures, with the place of one for a model called new."""
        names = tuple(new if n == name else n for n in self._names)
        opened = {n: m for n, m in self._opened.items() if n != name}
        return Signatures(self._source, self._inline, opened, names, self._make)

    def alone(self) -> Signatures[M]:
        """Return no signatures, to begin anew."""
        source = Source(self._source.what, {}, Holdings())
        return Signatures(source, self._inline, {}, (), self._make)
