"""One file for each family of rows. bench/row.py says what a row is, table.py lists the families."""
