"""Sweeps over kernel variants, and the fits of cost-model constants to them."""
