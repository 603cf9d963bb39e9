"""Partials of split row tiles and the ways to merge them."""
