"""What the CuTe kernels share: pipelines, barriers, PTX of SM90, fp8, operands of features."""
