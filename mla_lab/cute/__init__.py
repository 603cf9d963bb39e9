"""CuTe DSL kernels. Only modules of this package import cutlass, and only to compile."""
