"""Check of a peer: every element of every copy against the float64 reference.

The rule is that of `mla_lab.reference.tolerance`: at most twice the error of torch's own attention,
in the same precision on the inputs that are timed. Where torch has no result, fixed limits apply.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..reference.tolerance import ALLOWED_RATIO
from .cases import Case

#: bound on the relative error (Frobenius) of a whole output where torch's error is unknown, by
#: query dtype. 16-bit kernels have 1.8e-3 to 2.4e-3. Always used for e4m3, where torch computes in
#: bf16 while kernels round P to 3 bits of mantissa
LIMITS = {"bf16": 5e-3, "fp16": 5e-3, "e4m3": 6e-2, "fp32": 1e-5, "fp64": 1e-6}
#: allowance for float32 rounding
FLOOR = 1e-6
#: bound of the worst row over the bound of the whole output
ROW_FACTOR = 4.0


def limit(case: Case, sdpa_error: float | None) -> float:
    """Bound on a peer's relative error."""
    if sdpa_error is None or case.problem.q_dtype == "e4m3":
        return LIMITS[case.problem.q_dtype]
    return ALLOWED_RATIO * sdpa_error + FLOOR


@dataclass(frozen=True)
class Accuracy:
    """Errors of one peer over all checked outputs."""

    #: ||out - reference|| / ||reference||
    rel_error: float
    #: the same of the worst row (one query token and head)
    worst_row: float
    #: elements that are NaN or infinite
    nonfinite: int

    def objection(
        self, case: Case, sdpa_error: float | None = None, allowance: float = 0.0
    ) -> str | None:
        """Reason against accepting the result, or None. sdpa_error: torch's error, if known.
        allowance: what the peer's own rounding may add.
        """
        if self.nonfinite:
            return f"{self.nonfinite} elements are not finite"
        most = limit(case, sdpa_error) + allowance
        if not self.rel_error <= most:
            return f"relative error {self.rel_error:.1e}, limit {most:.1e}"
        if not self.worst_row <= ROW_FACTOR * most:
            return f"relative error of a row {self.worst_row:.1e}, limit {ROW_FACTOR * most:.1e}"
        return None


def compare(outputs: Iterable[tuple[Tensor, Tensor]]) -> Accuracy:
    """Errors over pairs (out, reference [.., latent]); one host sync for all of them."""
    measured = [_sums(out.reshape(reference.shape), reference) for out, reference in outputs]
    if not measured:
        return Accuracy(0.0, 0.0, 0)
    each = torch.stack(measured).double()
    error, norm, bad = each[:, :3].sum(0).tolist()
    return Accuracy((error / max(norm, 1e-30)) ** 0.5, float(each[:, 3].max()) ** 0.5, int(bad))


def _sums(out: Tensor, reference: Tensor) -> Tensor:
    """Squared error, squared norm, elements not finite, and the worst row's squared error."""
    got = out.float()
    finite = got.isfinite()
    error = torch.where(finite, got - reference, 0.0).square().sum(-1)
    norm = reference.square().sum(-1)
    # a row without keys must be exactly 0
    row = torch.where(error == 0, 0.0, error / norm.clamp_min(1e-30))
    return torch.stack([error.sum(), norm.sum(), (~finite).sum().float(), row.max()])
