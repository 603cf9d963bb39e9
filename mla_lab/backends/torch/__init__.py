"""The torch backend: a plan's work tiles on a CPU or a CUDA device."""
