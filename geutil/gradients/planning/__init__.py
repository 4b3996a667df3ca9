"""Chooses what to keep for the least peak."""

from geutil.gradients.planning.least_peak import MemoryChoice, choose_for_memory

__all__ = ["MemoryChoice", "choose_for_memory"]
