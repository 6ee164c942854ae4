"""How fast Telegrad is, beside other ways to call a function in another process, and beside what the machine allows.

`python -m bench` (or `make bench`) measures, `README.md` is the map.
"""
