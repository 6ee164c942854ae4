"""Pipelines: models in stages on workers that work on micro-batches in parallel.

Schedules and the division of batches are pure functions (`schedule`, `micro_batches`). At the owner, `stage` decides
which thread runs which pass, `local_step` runs it, and `requests` are the functions that others call. `pipeline`
is the caller's part, with the `times` of a step.
"""

from telegrad.nn.pipeline.pipeline import Pipeline
from telegrad.nn.pipeline.times import StepTimes

__all__ = ["Pipeline", "StepTimes"]
