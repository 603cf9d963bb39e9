"""Vocabulary that the CuTe kernels share: PTX of SM90, fp8, operands of features."""
