"""Policies: which tensors to keep, said by predicates that can be combined.

A policy is any function from a forward tensor to a truth value. "Every add under
stereo and every Conv2D under motion, but nothing of a batch norm" is

    all_of(
        any_of(
            all_of(inside("stereo"), by_type("Add", "AddV2")),
            all_of(inside("motion"), by_type("Conv2D")),
        ),
        not_(by_name("BatchNorm")),
    )
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from geutil.errors import ArgumentTypeError
from geutil.graph.types import Tensor, type_name
from geutil.memory.sizes import tensor_bytes

Policy: TypeAlias = Callable[[Tensor], bool]
"""Tells of a forward tensor whether it shall be kept."""


@dataclass(frozen=True)
class NamedPolicy:
    """A policy that reports can name."""

    name: str
    test: Policy

    def __call__(self, tensor: Tensor) -> bool:
        """Tell whether to keep a tensor."""
        return self.test(tensor)

    def __str__(self) -> str:
        return self.name


def name_of_policy(policy: Policy) -> str:
    """Return the name of a policy in reports."""
    if isinstance(policy, NamedPolicy):
        return policy.name
    return str(getattr(policy, "__name__", type(policy).__name__))


def _listed(name: str, policies: Iterable[Policy]) -> str:
    return f"{name}({', '.join(map(name_of_policy, policies))})"


def by_name(pattern: str | re.Pattern[str]) -> Policy:
    """Return the policy that keeps outputs of ops whose name matches a regex somewhere.

    Args:
        pattern: a regular expression, searched for in the name of the op.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import by_name
        >>> with tf.Graph().as_default():
        ...     x = tf.zeros([2], name="block1/out")
        >>> by_name("block[0-9]+/out$")(x)
        True
    """
    regex = re.compile(pattern)
    return NamedPolicy(
        f"by_name({regex.pattern!r})",
        lambda tensor: regex.search(tensor.op.name) is not None,
    )


def by_type(*types: str) -> Policy:
    """Return the policy that keeps outputs of ops of the given types.

    Args:
        types: types of ops, such as "Conv2D".

    Raises:
        ArgumentTypeError: no type is given, or one is no string.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import by_type
        >>> with tf.Graph().as_default():
        ...     x = tf.nn.relu(tf.zeros([2]))
        >>> by_type("Relu", "Relu6")(x), by_type("Conv2D")(x)
        (True, False)
    """
    if not types:
        raise ArgumentTypeError("by_type needs at least one type, such as 'Conv2D'")
    for name in types:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"a type of op is a string, got {type_name(name)}")
    op_types = frozenset(types)
    return NamedPolicy(
        f"by_type({', '.join(map(repr, types))})",
        lambda tensor: tensor.op.type in op_types,
    )


def larger_than(size: int) -> Policy:
    """Return the policy that keeps tensors of more than `size` bytes.

    An open dimension counts as in the report (see `shapes` of `gradients`), else as 32.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import larger_than
        >>> with tf.Graph().as_default():
        ...     x = tf.zeros([256, 4])
        >>> larger_than(4095)(x), larger_than(4096)(x)
        (True, False)
    """
    return NamedPolicy(
        f"larger_than({size})", lambda tensor: tensor_bytes(tensor) > size
    )


def inside(scope: str) -> Policy:
    """Return the policy that keeps outputs of ops under a name scope.

    Args:
        scope: the scope, which may stand anywhere in the name between slashes; a slash
            at its end makes no difference.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import inside
        >>> with tf.Graph().as_default():
        ...     x = tf.zeros([2], name="net/stereo/conv/out")
        >>> inside("stereo")(x), inside("net/stereo/")(x), inside("ster")(x)
        (True, True, False)
    """
    scope_path = f"/{scope.strip('/')}/"
    return NamedPolicy(
        f"inside({scope!r})",
        lambda tensor: scope_path in f"/{tensor.op.name.rpartition('/')[0]}/",
    )


def any_of(*policies: Policy) -> Policy:
    """Return the policy that keeps what at least one of `policies` keeps.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import any_of, by_type, inside
        >>> with tf.Graph().as_default():
        ...     x = tf.nn.relu(tf.zeros([2]), name="block/x")
        >>> any_of(by_type("Conv2D"), inside("block"))(x)
        True
    """
    return NamedPolicy(
        _listed("any_of", policies),
        lambda tensor: any(policy(tensor) for policy in policies),
    )


def all_of(*policies: Policy) -> Policy:
    """Return the policy that keeps what every one of `policies` keeps.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import all_of, by_type, inside
        >>> with tf.Graph().as_default():
        ...     x = tf.nn.relu(tf.zeros([2]), name="block/x")
        >>> all_of(by_type("Conv2D"), inside("block"))(x)
        False
    """
    return NamedPolicy(
        _listed("all_of", policies),
        lambda tensor: all(policy(tensor) for policy in policies),
    )


def not_(policy: Policy) -> Policy:
    """Return the policy that keeps what `policy` does not.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import by_name, not_
        >>> with tf.Graph().as_default():
        ...     x = tf.zeros([2], name="BatchNorm/x")
        >>> not_(by_name("BatchNorm"))(x)
        False
    """
    return NamedPolicy(_listed("not_", [policy]), lambda tensor: not policy(tensor))
