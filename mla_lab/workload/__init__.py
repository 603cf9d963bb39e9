"""Serving traces, and the decode problems that follow from them."""

from .loaders import load_azure, load_mooncake, load_trace
from .modes import DecodeStep, replay, sample
from .synthetic import shipped_trace, synthetic_trace
from .trace import Trace

__all__ = [
    "DecodeStep",
    "Trace",
    "load_azure",
    "load_mooncake",
    "load_trace",
    "replay",
    "sample",
    "shipped_trace",
    "synthetic_trace",
]
