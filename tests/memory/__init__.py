"""Tests of geutil.memory."""
