"""Protection of saved tensors from optimizer steps of other trainers."""
