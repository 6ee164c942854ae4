"""Benchmark of Telegrad against other frameworks and the baseline of the machine.

`python -m bench` (or `make bench`) runs it; `README.md` describes the files.
"""
