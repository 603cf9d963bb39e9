"""Merges of the partial results of a split row tile, for both kernel families."""
