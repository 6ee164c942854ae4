"""The caller's side: encode, send, and complete calls."""
