"""Values on their way between workers: pickling, tensors out of band, function names, exceptions."""
