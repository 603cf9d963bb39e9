"""The CUDA C++ backend: kernels of `kernels/` through tvm-ffi."""
