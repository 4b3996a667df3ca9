"""Rules that are often wanted. Each function makes a rule, or a group of rules."""

from geutil.rewrite.rules.constant_folding import constant_folding
from geutil.rewrite.rules.dead_branch import dead_branch_folding
from geutil.rewrite.rules.dropout import dropout_removal
from geutil.rewrite.rules.replacements import (
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
