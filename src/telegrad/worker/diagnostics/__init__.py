"""Diagnostics of a worker: snapshots, dumps on a signal, and a watchdog."""
