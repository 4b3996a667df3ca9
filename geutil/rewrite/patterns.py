"""Patterns, in the graph's own words, and compiled for the search.

A pattern is written from its root, the op furthest downstream, up to its inputs:
`Op("BiasAdd", Op("Conv2D", Any("x"), Const("w")), Const("b"), name="bias")`. A node of
it corresponds to one tensor (an op's node for that op's first output) and may be used
in several places: then all of them must be the same tensor, or the same op. So must two
captures of one name. Two different nodes may correspond to one op.

`compile_pattern` finds the anchors of a pattern, its depth, and quick tests that sort
out the impossible; `geutil.rewrite.matcher` does the search.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import EllipsisType
from typing import ClassVar, TypeAlias

import numpy as np
import tensorflow as tf

from geutil.errors import ArgumentTypeError, SelectionError
from geutil.graph.types import Operation, Tensor, type_name
from geutil.graph.walks import topological_order, tree
from geutil.select.networks.layers import MAX_IDENTITIES, origin_of

OpTest: TypeAlias = Callable[[Operation], typing.Any]
TensorTest: TypeAlias = Callable[[Tensor], typing.Any]
Types: TypeAlias = "str | Iterable[str] | OpTest"


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


class Leaf(Pattern):
    """A tensor whose origin matters. It captures the tensor that is read.

    The op behind it is not part of the match: matches that share it do not overlap.

    Args:
        name: captures the tensor.
        where: a predicate that the tensor must pass.
        through_identity: whether up to eight Identity ops may stand between the origin
            and the reader, as in frozen graphs (Const -> Identity).
    """

    wanted: ClassVar[str]
    origins: ClassVar[frozenset[str]]

    def __init__(
        self,
        name: str | None = None,
        *,
        where: TensorTest | None = None,
        through_identity: bool = True,
    ) -> None:
        check_name(name)
        self.name = name
        self.where = where
        self.through_identity = through_identity

    def accepts(self, tensor: Tensor) -> bool:
        """Return whether the tensor has such an origin."""
        origin = origin_of(tensor) if self.through_identity else tensor.op
        return origin.type in self.origins


class Const(Leaf):
    """A constant. `constant_value(match["w"])` is its value.

    Example:
        >>> from geutil.rewrite import Const
        >>> Const("w")
        Const('w')
    """

    wanted = "a constant"
    origins = frozenset({"Const"})


class Variable(Leaf):
    """The value of a variable: a ReadVariableOp, or the reference of a v1 variable.

    Example:
        >>> from geutil.rewrite import Variable
        >>> Variable("moving_mean")
        Variable('moving_mean')
    """

    wanted = "the value of a variable"
    origins = frozenset({"ReadVariableOp", "Variable", "VariableV2"})


class Weight(Leaf):
    """A constant or the value of a variable: a weight, frozen or not.

    Example:
        >>> from geutil.rewrite import Weight
        >>> Weight("kernel")
        Weight('kernel')
    """

    wanted = "a constant or the value of a variable"
    origins = Const.origins | Variable.origins


def constant_value(tensor: Tensor) -> np.ndarray:
    """Return the value of a tensor that the pattern `Const` accepts.

    Args:
        tensor: a tensor of a graph.

    Raises:
        SelectionError: it is no constant.

    Cost: that of copying the value.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.rewrite import constant_value
        >>> with tf.Graph().as_default():
        ...     x = tf.identity(tf.constant([1.0, 2.0]))
        >>> constant_value(x)
        array([1., 2.], dtype=float32)
    """
    origin = origin_of(tensor)
    if origin.type != "Const":
        raise SelectionError(
            f"'{tensor.name}' is no constant: it comes from '{origin.name}', a "
            f"{origin.type}; ask for Const() in the pattern"
        )
    value: np.ndarray = tf.make_ndarray(origin.get_attr("value"))
    return value


TypeSet: TypeAlias = frozenset[str] | None
"""Types of ops; None is every type."""


@dataclass(frozen=True, eq=False)
class RootTest:
    """The types that a root's producers must have, checked before any search."""

    inputs: tuple[TypeSet, ...]  # The types for each input of the pattern.
    # True if there may be no further inputs; None where no input is asked for.
    exact: bool | None
    commutative: bool  # Whether the inputs may come in any order.

    def passes(self, producers: Sequence[str]) -> bool:
        """Return whether ops of these types may stand at the inputs."""
        if self.exact is None:
            return True
        if len(producers) != len(self.inputs) and (
            self.exact or len(producers) < len(self.inputs)
        ):
            return False
        # The search finds who goes where: this test sorts out the impossible alone.
        if self.commutative:
            return all(
                types is None or not types.isdisjoint(producers)
                for types in self.inputs
            )
        return all(
            types is None or kind in types
            for types, kind in zip(self.inputs, producers, strict=False)
        )


@dataclass(frozen=True, eq=False)
class Compiled:
    """A checked pattern, with the tables for its search."""

    pattern: Pattern
    # The Op nodes that the root corresponds to, in order of choice.
    roots: tuple[Op, ...]
    tests: tuple[RootTest, ...]  # A test for each of `roots`.
    types: TypeSet  # The types of the roots; None is every type.
    # The types of op that may yield the tensor of each node, by `id`.
    types_of: Mapping[int, TypeSet]
    nodes: tuple[Pattern, ...]  # Every node, each once, the root first, depth first.
    ops: tuple[Op, ...]
    depth: int  # How many ops above the root the pattern looks.
    interior: TypeSet  # The types of the ops above the root that it looks at.

    def may_match(self, producers: Sequence[str]) -> bool:
        """Return whether a root with producers of these types is worth a search."""
        return any(test.passes(producers) for test in self.tests)


def compile_pattern(pattern: Pattern) -> Compiled:
    """Check a pattern and make the tables for its search."""
    if not isinstance(pattern, Pattern):
        raise ArgumentTypeError(
            f"expected a pattern such as Op('Relu', Any('x')), got {type_name(pattern)}"
        )
    roots = tuple(_roots(pattern))
    met: dict[Pattern, None] = {}
    for node in tree([pattern], lambda n: [c for c in n.children if c not in met]):
        met.setdefault(node)
    nodes = tuple(met)
    _check_names(nodes)
    depth: dict[int, int] = {}
    types: dict[int, TypeSet] = {}
    # A node comes after those that it is made of.
    for node in topological_order([pattern], attrgetter("children")):
        depth[id(node)] = _depth(node, depth)
        types[id(node)] = _types(node, types)
    return Compiled(
        pattern,
        roots,
        tuple(_root_test(root, types) for root in roots),
        _union(root.types for root in roots),
        types,
        nodes,
        tuple(node for node in nodes if isinstance(node, Op)),
        depth[id(pattern)],
        _union(
            types[id(node)]
            for node in nodes
            if node is not pattern
            and node not in roots
            and (not isinstance(node, Any) or node.where)
        ),
    )


def _roots(pattern: Pattern) -> Iterator[Op]:
    choices = pattern.alternatives if type(pattern) is Or else (pattern,)
    for choice in choices:
        if not isinstance(choice, Op):
            raise SelectionError(
                f"the root of a pattern is an op, or a choice of ops, not {choice!r}; "
                "begin with Op(...)"
            )
        if choice.only_consumer:
            raise SelectionError(
                f"{choice!r} is the root of a pattern, whose readers are never part of "
                "the match; ask for only_consumer= above it, or count them in where="
            )
        yield choice


def _check_names(nodes: tuple[Pattern, ...]) -> None:
    captured: dict[str, bool] = {}
    for node in nodes:
        if node.name is not None:
            is_op = isinstance(node, Op)
            if captured.setdefault(node.name, is_op) is not is_op:
                raise SelectionError(
                    f"'{node.name}' names an op and a tensor in one pattern; choose "
                    "another name for either"
                )


def _depth(node: Pattern, depth: dict[int, int]) -> int:
    if isinstance(node, Op):
        above = [depth[id(child)] + _steps_to(child) for child in node.inputs]
        return max(above, default=0)
    return max((depth[id(child)] for child in node.children), default=0)


def _steps_to(child: Pattern) -> int:
    """Return how many ops further up a pattern looks at an input."""
    if isinstance(child, Leaf):
        return 1 + (MAX_IDENTITIES if child.through_identity else 0)
    return 0 if isinstance(child, Any) and child.where is None else 1


def _types(node: Pattern, types: dict[int, TypeSet]) -> TypeSet:
    """Return the types of op that may yield the tensor a node corresponds to."""
    if isinstance(node, Op):
        return node.types
    if isinstance(node, Leaf):
        return node.origins | {"Identity"} if node.through_identity else node.origins
    if isinstance(node, Or | Output):
        return _union(types[id(child)] for child in node.children)
    return None


def _union(sets: Iterator[TypeSet]) -> TypeSet:
    union: set[str] = set()
    for types in sets:
        if types is None:
            return None
        union |= types
    return frozenset(union)


def _root_test(root: Op, types: dict[int, TypeSet]) -> RootTest:
    return RootTest(
        tuple(types[id(child)] for child in root.inputs),
        None if root.any_inputs else not root.open_ended,
        root.commutative,
    )
