"""Verification on a GPU: cases, oracle checks, records and their tables.

pairwise          choices such that every allowed pair of levels occurs
cases             the levels of a decode call, and a case's inputs
check             one case against the float64 oracle, on poisoned caches
published         the 396 configurations of a public pull request
costs             time with a feature over time without it, on the same caches
rounding          errors of eight-bit kernels beside torch with the same rounding
emulated_lse      lse of eight-bit calls in the emulator, with a card's arithmetic
sanitizer_cases   small calls that use each feature once, for compute-sanitizer
record            runs of these as JSON lines
tables            Markdown tables of those records
targets           bounds beside the figures that the records give
"""
