"""Membership of a worker: joins, leaves, the known members, and the shutdown."""
