"""What the examples share, and what none of them is about: starting processes, showing progress, and the digits."""
