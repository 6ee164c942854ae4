"""Pure protocol machines: standard library only, no I/O, no clock, no threads (see README.md for the theory)."""
