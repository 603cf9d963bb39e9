"""What the kernels with query rows on M share: `keep_ab_sm90`, `mla_sm100`, and their merges.

params          configuration, operands of a launch, a work tile
work_records    plan rows as records of work tiles in shared memory; visible positions of a row
mask            masked scores: the causal rule, or a packed mask of draft tokens
epilogue_store  stores of result rows
profile         events of profiled builds
"""
