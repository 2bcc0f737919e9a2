"""The lab: a workload played against a config in virtual time, and intervals planned from rates of failures."""

from __future__ import annotations

from stepwell.lab.outcome import Outcome
from stepwell.lab.plan import Plan, make_plan
from stepwell.lab.simulation import simulate
from stepwell.lab.speeds import Speeds, probe, read_speeds
from stepwell.lab.tier import Speed
from stepwell.lab.trace import Workload, from_files

__all__ = [
    "Outcome", "Plan", "Speed", "Speeds", "Workload", "from_files", "make_plan", "probe", "read_speeds", "simulate",
]  # fmt: skip
