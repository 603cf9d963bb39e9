"""Compiled kernels on a CPU: their PTX, whole, thread by thread, in Python and NumPy.

    result = emulate.run(my_kernel, q, kv, out)            # a @cute.jit function of one's own
    kernel = EmulatedKernel.of(artifact, Options(check=True))
    kernel(*args)                                          # the arguments of the compiled kernel
    kernel.run.findings                                    # races, missing fences, ...

| module | what it does |
|---|---|
| ptx, forms, rows, translate, emit_* | PTX text to Python functions, one a basic block |
| machine, gang, schedule | CTAs, clusters, warps with divergence, and who runs next |
| memory, barriers, copies, wgmma, lanes | what instructions do |
| tensor_memory, tcgen05 | SM100: tensor memory, and products that one thread issues |
| arithmetic, tiles, tensor_map | numbers and layouts, bit for bit |
| host, device, recorded | launches as a library's host code makes them, or as they were recorded |
| races, global_checks, shadow, flight, tensor_checks, findings | checks |
| observe, debugger | traces; steps, breakpoints, registers, tiles |
| calls, mutate | our own builds against the oracle; what is noticed when a barrier is deleted |
"""

from .findings import Fault, Finding
from .kernel import EmulatedKernel, Options, Run
from .schedule import SCHEDULES
from .user_kernel import run

__all__ = ["SCHEDULES", "EmulatedKernel", "Fault", "Finding", "Options", "Run", "run"]
