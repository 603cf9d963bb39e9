"""Check of one case against the float64 oracle: every element, and writes outside the outputs.

Caches are poisoned (`mla_lab.reference.inputs`), a given out and lse lie between guard rows, and
all cases share one workspace, zeroed once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..api import decode, replay
from ..api.contract import trtllm_batch_decode_with_kv_cache_mla
from ..backends.cute.catalogue import able
from ..backends.cute.families import costs
from ..backends.rank_mask import masked
from ..bench.checks import compare
from ..call.checks import form_of
from ..call.decode_args import native_args
from ..core import kv_cache as formats
from ..core.errors import MlaLabError
from ..core.gpu import H200, Gpu
from ..interop.flashinfer.first_use import ZEROED_BYTES
from ..plan import choose
from ..reference.inputs import DecodeInputs
from ..reference.mla import decode_reference
from ..reference.tolerance import lse_error
from . import cases
from .limits import limits_of

GUARD_VALUE = 7.0


@dataclass(frozen=True)
class Outcome:
    """Result of a case. status: ok, wrong, refused (by name) or failed (anything else)."""

    status: str
    backend: str = ""
    reason: str = ""
    rel_error: float = 0.0
    worst_row: float = 0.0
    lse_error: float = 0.0
    #: bound on rel_error
    allowed: float = 0.0

    def row(self) -> dict[str, Any]:
        """Plain values for a record, rounded."""
        return {
            name: float(f"{value:.2e}") if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }


def run_case(case: Mapping[str, str], seed: int, workspace: Tensor) -> Outcome:
    """Run the case on the workspace's device and judge the result."""
    inputs = cases.inputs_of(case, seed, workspace.device)
    given = {
        **inputs.contract_args(),
        **cases.choices_of(case),
        "workspace_buffer": workspace,
    }
    guards = Guards(inputs, case, given_out=seed % 2 == 1)
    given.update(guards.given())
    if case["plan"] == "given":
        gpu = Gpu.here() if workspace.is_cuda else None
        features = masked(form_of(native_args(**given)).features)
        here = able(inputs.problem, features)
        invariant = given["batch_invariant"]
        chosen = choose(inputs.problem, gpu or H200, invariant, costs(), able=here)
        given["plan"] = chosen.plan(inputs.problem)
    before = [value.clone() for value in _storages(inputs)]
    replay.clear()
    try:
        backend = taken(given)
        result = trtllm_batch_decode_with_kv_cache_mla(**given)
    except MlaLabError as error:
        return Outcome("refused", reason=str(error))
    out, lse = result if isinstance(result, tuple) else (result, None)
    objection = guards.objection() or _rewritten(before, inputs, workspace)
    return judge(inputs, out, lse, backend, objection)


def judge(
    inputs: DecodeInputs, out: Tensor, lse: Tensor | None, backend: str, objection: str | None
) -> Outcome:
    """Errors of a result against the oracle, and whether they are within their limits."""
    expected = decode_reference(replace(inputs, skip_softmax_threshold_scale_factor=None))
    found, limits = compare([(out.float(), expected.out)]), limits_of(inputs, expected)
    wrong_lse = 0.0 if lse is None else lse_error(lse, expected.lse)
    if objection is None and found.nonfinite:
        objection = f"{found.nonfinite} elements are not finite"
    measured = (
        ("relative error", found.rel_error, limits.rel_error),
        ("error of a row", found.worst_row, limits.worst_row),
        ("lse error", wrong_lse, limits.lse_error),
    )
    for name, error, limit in measured:
        if objection is None and not error <= limit:
            objection = f"{name} {error:.1e}, limit {limit:.1e}"
    status = "ok" if objection is None else "wrong"
    errors = (found.rel_error, found.worst_row, min(wrong_lse, 1e30))
    return Outcome(status, backend, objection or "", *errors, limits.rel_error)


class Guards:
    """A caller's out and lse between guard rows that must stay unchanged."""

    def __init__(self, inputs: DecodeInputs, case: Mapping[str, str], given_out: bool) -> None:
        problem, query = inputs.problem, inputs.query
        #: by name, the result with a guard row before and behind it
        self._rows: dict[str, Tensor] = {}
        if given_out or problem.out_dtype != "bf16":
            shape = (*query.shape[:-1], problem.latent_dim)
            self._guard("out", shape, formats.DTYPES[problem.out_dtype], query.device)
        if case["lse"] == "natural, 3-D":
            self._guard("lse", tuple(query.shape[:-1]), torch.float32, query.device)

    def _guard(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        rows = torch.full((shape[0] + 2, *shape[1:]), GUARD_VALUE, device=device)
        self._rows[name] = rows.to(dtype)

    def given(self) -> dict[str, Tensor]:
        """Arguments of the call."""
        return {name: rows[1:-1] for name, rows in self._rows.items()}

    def objection(self) -> str | None:
        """A sentence on writes outside the output; None without any."""
        for name, rows in self._rows.items():
            ends = rows[[0, -1]] if rows.dtype.itemsize > 1 else rows.float()[[0, -1]]
            if not bool((ends == GUARD_VALUE).all()):
                return f"{name}: rows outside of it were written"
        return None


def _storages(inputs: DecodeInputs) -> list[Tensor]:
    """All bytes behind the tensors that a call only reads, gaps included."""
    tensors = (
        inputs.query,
        inputs.kv_cache,
        inputs.block_tables,
        inputs.seq_lens,
        inputs.cum_seq_lens_q,
        inputs.mask,
        inputs.sinks,
        inputs.sparse_mla_top_k_lens,
        inputs.causal_seqlens_kv_global,
    )
    return [
        torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
        for t in tensors
        if isinstance(t, Tensor)
    ]


def _rewritten(before: list[Tensor], inputs: DecodeInputs, workspace: Tensor) -> str | None:
    for old, new in zip(before, _storages(inputs), strict=True):
        if not torch.equal(old, new):
            return "a tensor that is only read was written"
    if workspace.is_cuda and bool(workspace[:ZEROED_BYTES].any()):
        return "merge counters or LL partials are not zero after the call"
    return None


def taken(given: dict[str, Any]) -> str:
    """Name of the backend that "auto" selects for a call."""
    return next((v.name for v in decode.explain(**given) if v.taken), "")
