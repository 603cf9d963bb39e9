"""The CuTe backend: compiled kernels of `mla_lab.cute` on a Hopper card."""
