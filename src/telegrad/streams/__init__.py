"""Streams: results of generators on other workers, item by item."""
