"""What a peer is: something that can run a case, and says why when it cannot."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

import torch

from ... import __version__
from ..cases import Case
from ..rotation import Rotation
from ..timers import Launch


@dataclass(frozen=True)
class Prepared:
    """A case made ready for one peer."""

    #: one launch for each KV copy, in order; each returns its output [.., latent], which stands
    #: until the next launch, as they may share it
    launches: tuple[Launch, ...]
    #: makes the plan that all layers of a step share, as a caller would; None: there is none
    plan: Callable[[], Any] | None = None
    #: plan and launch of one copy in one CUDA graph; None where planning needs the host
    planned_launches: tuple[Launch, ...] | None = None
    #: holds while the launches are captured into a graph, to capture them at other lengths
    captured: Callable[[], AbstractContextManager[None]] = nullcontext
    #: what the peer chose, for the record (splits, kernel names)
    notes: dict[str, Any] = field(default_factory=dict)


class Peer(Protocol):
    """One contestant. Its module is imported only by `available` and `prepare`."""

    @property
    def name(self) -> str:
        """Unique, and short enough for a table."""

    def available(self, device: torch.device) -> str | None:
        """Why it cannot run on this machine at all, or None."""

    def refuses(self, case: Case) -> str | None:
        """Why it cannot run `case`, or None."""

    def version(self) -> str | None:
        """Of the library behind it."""

    def prepare(self, rotation: Rotation) -> Prepared:
        """Plan and allocate. Raises what the library raises.

        A peer for which NaN in unread slots is not harmless takes `rotation.without_poison`,
        and says so in its notes.
        """


class Contestant:
    """Answers that most peers share. `module` is the peer's library, empty for this package."""

    module = ""

    def available(self, device: torch.device) -> str | None:
        """As `Peer.available`: whether the library can be imported beside a GPU."""
        return missing(self.module, device) if self.module else None

    def refuses(self, case: Case) -> str | None:
        """As `Peer.refuses`: nothing here; a call of ours refuses while it is prepared."""
        return None

    def version(self) -> str | None:
        """As `Peer.version`."""
        if not self.module:
            return __version__
        return getattr(import_module(self.module.split(".")[0]), "__version__", None)


def refuse_beyond_plain(case: Case) -> str | None:
    """Refusal of libraries that have only dense bf16 or fp16 MLA decode."""
    problem = case.problem
    if problem.top_k:
        return "sparse: got top_k, supported: dense"
    if (problem.q_dtype, problem.kv_format) != ("bf16", "bf16"):
        return f"dtypes: got {problem.q_dtype} and {problem.kv_format}, supported: bf16"
    beyond = sorted(set(case.features) - {"lse", "ragged"})
    if beyond:
        return f"features: got {', '.join(beyond)}, supported: none of them"
    if case.skip_softmax is not None:
        return "skip_softmax: got a threshold, supported: none"
    if case.batch_invariant:
        return "batch_invariant: got True, supported: False"
    return None


def refuse_unequal_queries(case: Case) -> str | None:
    """For libraries that take one q_len for the whole batch."""
    if len(set(case.problem.q_lens)) > 1:
        return "q_lens: got different ones, supported: one q_len for all requests"
    return None


def missing(module: str, device: torch.device) -> str | None:
    """Why `module` cannot be used on `device`: no GPU, not installed, or broken."""
    if device.type != "cuda":
        return f"device: got {device}, supported: an NVIDIA GPU"
    try:
        __import__(module)
    except Exception as error:  # a broken build may raise anything; the row keeps what
        return f"import {module}: {type(error).__name__}: {error}"
    return None
