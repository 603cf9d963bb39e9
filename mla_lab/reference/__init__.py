"""The meaning of a call in float64, inputs that poison what must not be read, and tolerances."""
