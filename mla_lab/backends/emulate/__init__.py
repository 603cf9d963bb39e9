"""The emulating backend: the CuTe backend's launches on a CPU, instruction by instruction."""
