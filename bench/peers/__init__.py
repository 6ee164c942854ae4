"""One file for each peer. base.py says what one is, table.py lists them."""
