"""Interactive figures of the notebooks, one module each."""
