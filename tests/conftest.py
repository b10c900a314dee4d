"""Shared by all tests: hypothesis runs the same examples every time, and never judges by the clock."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("cpd", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("cpd")
