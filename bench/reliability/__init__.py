"""Figures of reliability: how fast faults are noticed, how often they are tried."""
