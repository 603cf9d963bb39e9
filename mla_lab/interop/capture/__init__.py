"""Traces of a program's decode calls, as definitions that others can read, run and optimise.

    with recording("calls/"):          or: MLA_LAB_TRACE=calls/ in the environment
        serve()

    calls/definitions/mla_paged/NAME.json   what is computed: axes, tensors, reference, input maker
    calls/solutions/mla_paged/NAME/mla_lab_NAME.json    our call as a solution of it
    calls/workloads/mla_paged/NAME.jsonl    each set of sizes that it was called with, once

The files follow the schema of FlashInfer-Bench (github.com/flashinfer-ai/flashinfer-bench, Apache
2.0, `flashinfer_bench/data`), so that its users can load them.
"""

from .definition import definition_of, sizes_of
from .recorder import VARIABLE, Recorder, recording, start_from_environment
from .solution import solution_of

__all__ = [
    "VARIABLE",
    "Recorder",
    "definition_of",
    "recording",
    "sizes_of",
    "solution_of",
    "start_from_environment",
]
