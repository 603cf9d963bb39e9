"""Is a peer right? Every element of every copy against the float64 reference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .cases import Case

#: relative error (Frobenius) that a whole output may have, by query dtype. 16-bit kernels reach
#: 1.8e-3 to 2.4e-3, e4m3 ones are dominated by the rounding of P to 3 bits of mantissa
LIMITS = {"bf16": 5e-3, "fp16": 5e-3, "e4m3": 6e-2, "fp32": 1e-5, "fp64": 1e-6}
#: the worst row may be this much further off than the whole may be
ROW_FACTOR = 4.0


@dataclass(frozen=True)
class Accuracy:
    """Errors of one peer over all outputs that were looked at."""

    #: ||out - reference|| / ||reference||
    rel_error: float
    #: the same of the worst row (one query token and head)
    worst_row: float
    #: elements that are NaN or infinite
    nonfinite: int

    def objection(self, case: Case) -> str | None:
        """Why the result cannot be accepted, or None."""
        if self.nonfinite:
            return f"{self.nonfinite} elements are not finite"
        limit = LIMITS[case.problem.q_dtype] + 2 * (case.skip_softmax or 0.0)
        if not self.rel_error <= limit:
            return f"relative error {self.rel_error:.1e}, limit {limit:.1e}"
        if not self.worst_row <= ROW_FACTOR * limit:
            return f"relative error of a row {self.worst_row:.1e}, limit {ROW_FACTOR * limit:.1e}"
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
