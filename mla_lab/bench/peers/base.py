"""Protocol of a peer: it runs a case, or gives the reason why it cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar, Protocol

import torch

from ...core.version import __version__
from ..cases import Case
from ..rotation import Rotation
from ..timers import Launch


@dataclass(frozen=True)
class Prepared:
    """A case made ready for one peer."""

    #: one launch for each KV copy, in order; each returns its output [.., latent], valid until the
    #: next launch, as launches may share it
    launches: tuple[Launch, ...]
    #: makes the plan that all layers of a step share; None: no plan
    plan: Callable[[], Any] | None = None
    #: plan and launch of one copy in one CUDA graph; None where planning needs the host
    planned_launches: tuple[Launch, ...] | None = None
    #: as `launches`, at other lengths; None for a peer that keeps nothing from launch to launch
    other_lengths: tuple[Launch, ...] | None = None
    #: context manager around the graph capture, to capture at other lengths
    captured: Callable[[], AbstractContextManager[None]] = nullcontext
    #: choices of the peer for the record (splits, kernel names)
    notes: dict[str, Any] = field(default_factory=dict)
    #: relative error beyond torch's that the peer's own rounding may add; its notes say why
    allowance: float = 0.0


class Peer(Protocol):
    """One peer. Its library is imported only by `available` and `prepare`."""

    @property
    def name(self) -> str:
        """Unique name, short enough for a table."""

    def available(self, device: torch.device) -> str | None:
        """Reason why it cannot run on this machine, or None."""

    def refuses(self, case: Case) -> str | None:
        """Reason why it cannot run `case`, or None."""

    def version(self) -> str | None:
        """Version of its library."""

    def prepare(self, rotation: Rotation) -> Prepared:
        """Plan and allocate. Raises what the library raises.

        A peer whose result depends on NaN in unread slots uses `rotation.without_poison`, and
        notes it.
        """


class PeerBase:
    """Base class of peers. `module` is the peer's library, empty for this package; `refusals` say
    why it cannot run a case, none for our calls, which refuse in `prepare`."""

    module = ""
    refusals: ClassVar[Sequence[Callable[[Case], str | None]]] = ()

    def available(self, device: torch.device) -> str | None:
        """As `Peer.available`: whether the library can be imported beside a GPU."""
        return missing(self.module, device) if self.module else None

    def refuses(self, case: Case) -> str | None:
        """As `Peer.refuses`: the first reason of `refusals`."""
        return next(filter(None, (refusal(case) for refusal in self.refusals)), None)

    def version(self) -> str | None:
        if not self.module:
            return __version__
        return getattr(import_module(self.module.split(".")[0]), "__version__", None)


def refuse_beyond_plain(case: Case) -> str | None:
    """Reason for libraries that only have dense bf16 or fp16 MLA decode, or None."""
    problem = case.problem
    if problem.top_k:
        return "sparse: got top_k, supported: dense"
    if (problem.q_dtype, problem.kv_format) != ("bf16", "bf16"):
        return f"dtypes: got {problem.q_dtype} and {problem.kv_format}, supported: bf16"
    beyond = sorted(set(case.features) - {"lse", "ragged"})
    if beyond:
        return f"features: got {', '.join(beyond)}, supported: none of them"
    if case.batch_invariant:
        return "batch_invariant: got True, supported: False"
    return None


def refuse_unequal_queries(case: Case) -> str | None:
    """Reason for libraries that take one q_len for the whole batch, or None."""
    if len(set(case.problem.q_lens)) > 1:
        return "q_lens: got different ones, supported: one q_len for all requests"
    return None


def missing(module: str, device: torch.device) -> str | None:
    """Reason why `module` cannot be used on `device`: no GPU, not installed, or broken."""
    if device.type != "cuda":
        return f"device: got {device}, supported: an NVIDIA GPU"
    try:
        __import__(module)
    except Exception as error:  # a broken build may raise any exception, which the row records
        return f"import {module}: {type(error).__name__}: {error}"
    return None
