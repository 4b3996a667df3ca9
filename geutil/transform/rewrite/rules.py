"""The names of `geutil.rewrite.rules`, by the path that they had."""

from geutil.rewrite.rules import (
    constant_folding,
    dead_branch_folding,
    dropout_removal,
    identity_elimination,
    relu6_to_relu,
    swap_op,
)

__all__ = [
    "constant_folding",
    "dead_branch_folding",
    "dropout_removal",
    "identity_elimination",
    "relu6_to_relu",
    "swap_op",
]
