"""Chooses the tensors to keep: for the least peak, or for a budget."""

from geutil.gradients.planning.budget_search import BudgetSearch
from geutil.gradients.planning.least_peak import choose_for_memory
from geutil.gradients.planning.plans import (
    Budget,
    Plan,
    PlanCurve,
    make_plan,
    planned_recomputation,
)

__all__ = [
    "Budget",
    "BudgetSearch",
    "Plan",
    "PlanCurve",
    "choose_for_memory",
    "make_plan",
    "planned_recomputation",
]
