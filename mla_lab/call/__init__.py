"""A call's arguments and their checks: what the caller gave becomes a `Call`, or one error."""
