"""Chooses what to keep: for the least peak, or the least compute within a budget."""

from geutil.gradients.planning.least_peak import MemoryChoice, choose_for_memory
from geutil.gradients.planning.plans import Plan, make_plan, planned_recomputation
from geutil.gradients.planning.under_budget import Budget, choose_within

__all__ = [
    "Budget",
    "MemoryChoice",
    "Plan",
    "choose_for_memory",
    "choose_within",
    "make_plan",
    "planned_recomputation",
]
