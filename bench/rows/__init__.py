"""Families of rows, a file each. bench/row.py defines a row, table.py lists them."""
