"""Programs of their own, for what shows only after long: each says what it looks at, and judges it by itself."""
