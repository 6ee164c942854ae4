"""Soak: workers in real processes, work whose results are checked, and faults."""
