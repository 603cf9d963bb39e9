"""Is a peer right? Every element of every copy against the float64 reference.

The rule is that of `mla_lab.reference.tolerance`: at most twice the error of torch's own attention,
in the same precision on the very inputs that are timed. Fixed limits stand in where it says
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..reference.tolerance import ALLOWED_RATIO
from .cases import Case

#: relative error (Frobenius) that a whole output may have where torch's is not known, by query
#: dtype. 16-bit kernels reach 1.8e-3 to 2.4e-3. For e4m3 they always hold: torch attends in bf16
#: there, while kernels round P to 3 bits of mantissa
LIMITS = {"bf16": 5e-3, "fp16": 5e-3, "e4m3": 6e-2, "fp32": 1e-5, "fp64": 1e-6}
#: float32 rounding, free of charge
FLOOR = 1e-6
#: the worst row may be this much further off than the whole may be
ROW_FACTOR = 4.0


def limit(case: Case, sdpa_error: float | None) -> float:
    """Relative error that a peer may have; skip-softmax may drop its threshold on top."""
    dropped = 2 * (case.skip_softmax or 0.0)
    if sdpa_error is None or case.problem.q_dtype == "e4m3":
        return LIMITS[case.problem.q_dtype] + dropped
    return ALLOWED_RATIO * sdpa_error + FLOOR + dropped


@dataclass(frozen=True)
class Accuracy:
    """Errors of one peer over all outputs that were looked at."""

    #: ||out - reference|| / ||reference||
    rel_error: float
    #: the same of the worst row (one query token and head)
    worst_row: float
    #: elements that are NaN or infinite
    nonfinite: int

    def objection(self, case: Case, sdpa_error: float | None = None) -> str | None:
        """Why the result cannot be accepted, or None. sdpa_error: torch's, where it is known."""
        if self.nonfinite:
            return f"{self.nonfinite} elements are not finite"
        most = limit(case, sdpa_error)
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
    # a row without keys has reference 0 and must be exactly that
    row = torch.where(error == 0, 0.0, error / norm.clamp_min(1e-30))
    return torch.stack([error.sum(), norm.sum(), (~finite).sum().float(), row.max()])
