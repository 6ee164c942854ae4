"""The local graph of a pass: one walk, its partition, and the plan of the pass."""
