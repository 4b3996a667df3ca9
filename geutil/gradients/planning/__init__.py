"""Chooses the tensors to keep: for the least peak, or for a budget."""

from geutil.gradients.planning.least_peak import choose_for_memory
from geutil.gradients.planning.plans import (
    Plan,
    PlanCurve,
    make_plan,
    planned_recomputation,
)
from geutil.gradients.planning.under_budget import Budget, BudgetSearch

__all__ = [
    "Budget",
    "BudgetSearch",
    "Plan",
    "PlanCurve",
    "choose_for_memory",
    "make_plan",
    "planned_recomputation",
]
