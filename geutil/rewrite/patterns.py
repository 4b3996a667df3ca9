"""Patterns, in the graph's own words.

A pattern is written from its root, the op furthest downstream, up to its inputs:
`Op("BiasAdd", Op("Conv2D", Any("x"), Const("w")), Const("b"), name="bias")`. A node of
it corresponds to one tensor (an op's node for that op's first output) and may be used
in several places: then all of them must be the same tensor, or the same op. So must two
captures of one name. Two different nodes may correspond to one op.

The leaves `Const`, `Variable` and `Weight` are in `geutil.rewrite.compiling`.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Mapping
from types import EllipsisType

from geutil.errors import ArgumentTypeError, SelectionError
from geutil.graph.types import Operation, Tensor, type_name

OpTest: typing.TypeAlias = Callable[[Operation], typing.Any]
TensorTest: typing.TypeAlias = Callable[[Tensor], typing.Any]
Types: typing.TypeAlias = "str | Iterable[str] | OpTest"


class Pattern:
    """A node of a pattern; corresponds to a tensor.

    `pattern | other` is `Or(pattern, other)`.
    """

    name: str | None = None

    def __or__(self, other: Pattern) -> Or:
        return Or(self, other)

    @property
    def children(self) -> tuple[Pattern, ...]:
        """The nodes that this one is made of, in order."""
        return ()

    def describe(self) -> str:
        """Return the node in the words of the pattern, without its children."""
        shown = "" if self.name is None else repr(self.name)
        return f"{type(self).__name__}({shown})"

    def __repr__(self) -> str:
        return self.describe()


class Any(Pattern):
    """Any tensor.

    Args:
        name: captures the tensor.
        where: a predicate that the tensor must pass.

    Example:
        >>> from geutil.rewrite import Any, Op
        >>> Op("Mul", x := Any("x"), x)
        Op('Mul', Any('x'), Any('x'))
    """

    def __init__(
        self, name: str | None = None, *, where: TensorTest | None = None
    ) -> None:
        check_name(name)
        self.name = name
        self.where = where


class Op(Pattern):
    """An op of some type, and its inputs; as a tensor, its first output.

    Args:
        types: a type, several, or a predicate on the op.
        *inputs: a pattern for each data input. None at all: the inputs are not looked
            at. A final `...` corresponds to any further inputs.
        name: captures the op.
        where: a predicate that the op must pass.
        only_consumer: nothing outside the match may read an output of the op; ops that
            a rewrite left without readers do not count. Not for the root, whose readers
            are never part of the match.
        commutative: the inputs may come in any order; the first order that matches
            counts, in the order of the op's own inputs.
        attrs: for each attribute its value, or a predicate on the value. A str
            corresponds to bytes too.

    Raises:
        ArgumentTypeError: an input is no pattern.
        SelectionError: `...` is not the last input; there are no types.

    Example:
        >>> from geutil.rewrite import Any, Const, Op
        >>> conv = Op("Conv2D", Any("x"), Const("w"), name="conv", only_consumer=True)
        >>> Op({"Add", "AddV2"}, conv, Const("b"), commutative=True)
        Op('Add|AddV2', Op('Conv2D', Any('x'), Const('w'), name='conv'), Const('b'))
    """

    def __init__(
        self,
        types: Types,
        *inputs: Pattern | EllipsisType,
        name: str | None = None,
        where: OpTest | None = None,
        only_consumer: bool = False,
        commutative: bool = False,
        attrs: Mapping[str, typing.Any] | None = None,
    ) -> None:
        check_name(name)
        self.test: OpTest | None = None
        self.types: frozenset[str] | None = None
        # A str would pass as an iterable of one-letter types.
        if isinstance(types, str):
            self.types = frozenset((types,))
        elif callable(types):
            self.test = types
        else:
            self.types = frozenset(types)
        if self.types is not None and not self.types:
            raise SelectionError("an Op needs a type; pass one, or a predicate on ops")
        self.any_inputs = not inputs
        self.open_ended = bool(inputs) and inputs[-1] is ...
        listed = inputs[:-1] if self.open_ended else inputs
        if any(child is ... for child in listed):
            raise SelectionError("`...` stands for the inputs that follow: put it last")
        self.inputs = tuple(_pattern(child) for child in listed)
        self.name = name
        self.where = where
        self.only_consumer = only_consumer
        self.commutative = commutative
        self.attrs = dict(attrs or {})

    def __getitem__(self, index: int) -> Output:
        """Return the pattern of output `index` of the op."""
        return Output(self, index)

    @property
    def children(self) -> tuple[Pattern, ...]:
        """See `Pattern`."""
        return self.inputs

    def types_text(self) -> str:
        """Return the types, or the name of the predicate."""
        if self.types is None:
            return getattr(self.test, "__name__", "predicate")
        return "|".join(sorted(self.types))

    def describe(self) -> str:
        """See `Pattern`."""
        name = f", name={self.name!r}" if self.name else ""
        return f"Op({self.types_text()!r}{name})"

    def __repr__(self) -> str:
        parts = [repr(self.types_text()), *map(repr, self.inputs)]
        parts += ["..."] if self.open_ended else []
        parts += [f"name={self.name!r}"] if self.name else []
        return f"Op({', '.join(parts)})"


class Output(Pattern):
    """One output of an op with several; written `op[index]`.

    Example:
        >>> from geutil.rewrite import Any, Op
        >>> split = Op("Split", Any(), Any("x"), attrs={"num_split": 2})
        >>> Op("AddV2", split[0], split[1])
        Op('AddV2', Op('Split', Any(), Any('x'))[0], Op('Split', Any(), Any('x'))[1])
    """

    def __init__(self, op: Op, index: int) -> None:
        if index < 0:
            raise SelectionError(f"outputs are counted from 0 on, got {index}")
        self.op = op
        self.index = index

    @property
    def children(self) -> tuple[Pattern, ...]:
        """See `Pattern`."""
        return (self.op,)

    def __repr__(self) -> str:
        return f"{self.op!r}[{self.index}]"

    def describe(self) -> str:
        """See `Pattern`."""
        return f"{self.op.describe()}[{self.index}]"


class Or(Pattern):
    """One of several patterns: the first that leads to a match.

    Raises:
        ArgumentTypeError: one is no pattern.
        SelectionError: there are none.

    Example:
        >>> from geutil.rewrite import Any, Op, Or
        >>> Or(Op("Relu", x := Any("x")), Op("Relu6", x))
        (Op('Relu', Any('x')) | Op('Relu6', Any('x')))
    """

    def __init__(self, *alternatives: Pattern) -> None:
        if not alternatives:
            raise SelectionError("Or needs patterns to choose from")
        listed = map(_pattern, alternatives)
        self.alternatives: tuple[Pattern, ...] = tuple(
            inner
            for p in listed
            for inner in (p.alternatives if type(p) is Or else (p,))
        )

    @property
    def children(self) -> tuple[Pattern, ...]:
        """See `Pattern`."""
        return self.alternatives

    def __repr__(self) -> str:
        return f"({' | '.join(map(repr, self.alternatives))})"

    def describe(self) -> str:
        """See `Pattern`."""
        return " | ".join(p.describe() for p in self.alternatives)


class Optional(Or):
    """An op that may be missing: then its input matches there itself.

    Args:
        pattern: the pattern with the op.
        otherwise: the pattern without it; None is the first input of the op.

    Raises:
        ArgumentTypeError: an argument is no pattern.
        SelectionError: `otherwise` is None and `pattern` is no Op with inputs.

    Example:
        >>> from geutil.rewrite import Any, Op, Optional
        >>> Op("Relu", Optional(Op("Identity", Any("x"))))
        Op('Relu', Optional(Op('Identity', Any('x'))))
    """

    def __init__(self, pattern: Pattern, otherwise: Pattern | None = None) -> None:
        if otherwise is None:
            if not isinstance(pattern, Op) or not pattern.inputs:
                raise SelectionError(
                    f"{pattern!r} has no first input to stand there without it; pass "
                    "otherwise="
                )
            otherwise = pattern.inputs[0]
        super().__init__(pattern, otherwise)
        self.pattern = pattern

    def __repr__(self) -> str:
        return f"Optional({self.pattern!r})"

    def describe(self) -> str:
        """See `Pattern`."""
        return f"Optional({self.pattern.describe()})"


def _pattern(obj: object) -> Pattern:
    if not isinstance(obj, Pattern):
        raise ArgumentTypeError(
            f"expected a pattern such as Any() or Op(...), got {type_name(obj)}"
        )
    return obj


def check_name(name: object) -> None:
    """Raise `ArgumentTypeError` unless `name` is a str or None."""
    if name is not None and not isinstance(name, str):
        raise ArgumentTypeError(
            f"the name of a capture is a str, got {type_name(name)}"
        )
