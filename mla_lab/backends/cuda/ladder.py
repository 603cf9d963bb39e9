"""The ladder: MLA decode in bf16 in ten CUDA C++ steps, from the formula to split-kv.

Each step changes one thing (`kernels/ladder/stepN_NAME.cuh`), and all take the same call. They are
written to be read, compared and timed; `decode` does not use them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ... import jit
from ...call.feature_operands import LOG2_E
from ...core.dims import LATENT_DIM, ROPE_DIM
from ...core.errors import invalid, unsupported
from ...core.gpu import H200, Gpu
from ...core.problem import Problem
from ...plan.config import KernelConfig
from ...reference.inputs import DecodeInputs
from ...reference.operands import q_begins
from ..base import current

CONFIG = KernelConfig("cuda/ladder")
#: rows and keys of a block's tile from step 4 on
TILE_ROWS, TILE_KEYS = 64, 64


@dataclass(frozen=True)
class Step:
    """One rung: its number, its file's name and its one idea."""

    number: int
    name: str
    idea: str

    @property
    def file(self) -> str:
        """In kernels/ladder."""
        return f"step{self.number}_{self.name}.cuh"


STEPS = tuple(
    Step(number, name, idea)
    for number, (name, idea) in enumerate(
        (
            ("formula", "three kernels, one thread a result"),
            ("coalesced", "a warp reads a row together, 16 bytes a lane"),
            ("online", "online softmax: one pass, the key in registers is the value too"),
            ("shared", "16 rows of a block share a tile of keys in shared memory"),
            ("tensor_cores", "mma.sync on 64 rows x 64 keys, operands by ldmatrix"),
            ("swizzle", "chunks of a row in another order in each row: no bank conflicts"),
            ("cp_async", "the next tile is on its way while this one is worked on"),
            ("split", "several blocks share a row tile's keys; a second kernel merges"),
            ("warp_grid", "a squarer share of the product for each warp"),
            ("look_ahead", "page ids a tile ahead, addresses once for a token"),
        )
    )
)
#: the first step that cuts a row tile's keys
FIRST_SPLIT = 7
#: a split is a block of the grid's z
MAX_SPLITS = 65535
#: the step that was thought of after the others had been measured
LOOK_AHEAD = 9


def num_splits(step: int, problem: Problem, gpu: Gpu = H200) -> int:
    """Pieces of each row tile's keys: as many blocks as SMs, and no piece below a tile."""
    if step < FIRST_SPLIT:
        return 1
    blocks = sum(-(-q_len * problem.heads // TILE_ROWS) for q_len in problem.q_lens)
    tiles = -(-max(problem.kv_lens) // TILE_KEYS)
    return max(1, min(gpu.sms // max(blocks, 1), tiles))


def shared_bytes(step: int) -> int:
    """Shared memory of a block of the step's largest kernel, as its file lays it out."""
    token = 2 * (LATENT_DIM + ROPE_DIM)
    if step <= 2:
        return 0
    if step == 3:
        return 32 * token
    key_tiles = 1 if step < 6 else 2
    weights, row_values = TILE_ROWS * TILE_KEYS * 2, 2 * 4 * TILE_ROWS * 4
    return (TILE_ROWS + key_tiles * TILE_KEYS) * token + weights + row_values


class Ladder:
    """One step made ready for calls like `inputs`: results and scratch are allocated here.

    Dense bf16 calls without masks, sinks or other features; causal where q_len > 1. Raises
    Unsupported for others, InvalidInput for a step that is none and for splits that it has not.
    """

    def __init__(self, step: int, inputs: DecodeInputs, splits: int | None = None) -> None:
        if not 0 <= step < len(STEPS):
            raise invalid("step", step, f"0 to {len(STEPS) - 1}")
        most = MAX_SPLITS if step >= FIRST_SPLIT else 1
        if splits is not None and not 1 <= splits <= most:
            raise invalid("splits", splits, f"1 to {most} in step {step}")
        _check(inputs)
        problem, query = inputs.problem, inputs.query
        device = query.device
        rows = problem.total_q * problem.heads
        self.step, self.inputs = step, inputs
        self.splits = num_splits(step, problem) if splits is None else splits
        self.q_begin = torch.tensor(q_begins(inputs), dtype=torch.int32, device=device)
        self.out = query.new_full((rows, LATENT_DIM), torch.nan)
        self.lse = torch.full((rows,), torch.nan, device=device)
        kernel = _kernel(device)
        self.decode = kernel.launch
        floats = kernel.function("scratch")(step, rows, max(problem.kv_lens), self.splits)
        self.scratch = torch.empty(floats, dtype=torch.float32, device=device)

    def __call__(self) -> Tensor:
        """Enqueue the call; returns out [total_q, heads, 512], the same tensor each time."""
        args, problem = self.inputs, self.inputs.problem
        with current(args.query.device):
            self.decode(
                self.step,
                args.query.view(-1, args.query.shape[-1]),
                args.kv_cache,
                args.block_tables,
                args.seq_lens,
                self.q_begin,
                self.out,
                self.lse,
                self.scratch,
                problem.heads,
                max(problem.q_lens),
                max(problem.kv_lens),
                self.splits,
                float(args.bmm1_scale) * LOG2_E,
                float(args.bmm2_scale),
            )
        return self.out.view(problem.total_q, problem.heads, -1)


@cache
def _kernel(device: torch.device) -> jit.Kernel:
    return jit.kernel(CONFIG, jit.device_arch(device.index))


def _check(inputs: DecodeInputs) -> None:
    problem = inputs.problem
    formats = (problem.q_dtype, problem.kv_format, problem.latent_dim, problem.rope_dim)
    if formats != ("bf16", "bf16", LATENT_DIM, ROPE_DIM) or problem.top_k:
        raise unsupported("problem", f"{formats}, top_k {problem.top_k}", "dense bf16, 512 + 64")
    beyond = [inputs.sinks, inputs.mask, inputs.skip_softmax_threshold_scale_factor]
    tables = inputs.uses_shared_paged_kv_idx and not inputs.enable_dcp
    if any(value is not None for value in beyond) or not tables:
        raise unsupported("inputs", "a call with more features", "plain and causal calls")
    if isinstance(inputs.bmm1_scale, Tensor) or isinstance(inputs.bmm2_scale, Tensor):
        raise unsupported("bmm1_scale, bmm2_scale", "tensors", "numbers")
    if inputs.kv_cache.dim() != 3:
        raise unsupported("kv_cache", f"{inputs.kv_cache.dim()} dimensions", "3")
