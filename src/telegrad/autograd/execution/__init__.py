"""Execution of a pass on one worker: torch's engine, stages, and the accumulation into leaves."""
