"""Pure protocol machines: standard library only, no I/O, clock or threads.

README.md in this folder has the theory.
"""
