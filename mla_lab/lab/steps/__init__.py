"""Notebooks 60 to 69: a reader's functions inside the kernel of a step, compiled and emulated.

`kernel("61", threads_over_tile, numbers_of_thread)` is the module of step 61 in
`mla_lab.cute.steps` with these two functions in place of the author's; `solution("61")` is the
module as it stands. Either compiles once and is then taken from the cache of kernels.
"""

from .catalogue import STEPS, Step, step, trial
from .kernel import StepKernel, kernel, solution

__all__ = ["STEPS", "Step", "StepKernel", "kernel", "solution", "step", "trial"]
