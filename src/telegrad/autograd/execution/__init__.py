"""Execution of a pass on one worker: torch's engine, stages, leaf gradients."""
