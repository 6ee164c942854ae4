"""Remote references of one worker: owned values, and the glue to their protocol."""
