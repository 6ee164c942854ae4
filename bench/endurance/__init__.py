"""Programs that measure long runs; each describes and checks its own figures."""
