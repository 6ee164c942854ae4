"""The callee's side: threads, the event loop, and the handlers of requests."""
