"""The commands of `mla-lab`, one module each."""
