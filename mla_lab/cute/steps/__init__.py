"""The kernels of notebooks 60 to 69: an MLA decode in ten steps, one idea each.

A module is a step as its author wrote it. It imports what the steps before it made, and each has a
`@cute.jit` function `launch`. In a notebook some functions of a module, named in
`mla_lab.lab.steps`, are the reader's to write; theirs replace these, and all else stays.

| module | idea |
|---|---|
| empty_kernel | a CTA of warp groups, and the registers of its roles |
| tile_copy | a tile through shared memory, by layouts |
| swizzled_tile | rows and columns of a tile without bank conflicts |
| page_load | TMA copies of a page |
| one_barrier | an mbarrier, phase by phase |
| stage_ring | full and empty barriers of a ring of stages |
| scores | S = Q K^T by wgmma |
| online_softmax | row max and row sum in registers |
| values | O = P V, with V as the transposed view of K |
| split_keep_ab | splits, their LL merge, and workers that find their own share |

The shape is small, so that a kernel compiles in about a second: 64 query rows, a latent of 128 and
a rope of 64 numbers a token, pages and tiles of 64 tokens.
"""
