"""Competitors of the bench. base.py defines the interface, table.py lists them."""
