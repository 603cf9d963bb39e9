"""Float64 oracle, seeded inputs with poisoned memory, and tolerances."""
