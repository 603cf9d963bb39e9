"""One step of the ladder as a peer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...backends.cuda.ladder import STEPS, Ladder
from ...core.gpu import H200, Gpu
from .. import ladder_model
from ..rotation import Rotation
from .base import PeerBase, Prepared, refuse_beyond_plain


@dataclass(frozen=True)
class LadderStep(PeerBase):
    """One step; its notes have the predicted time."""

    refusals = (refuse_beyond_plain,)
    number: int

    @property
    def name(self) -> str:
        """`ladder-`, the step's number and its name."""
        step = STEPS[self.number]
        return f"ladder-{step.number}-{step.name}"

    def available(self, device: torch.device) -> str | None:
        return None if device.type == "cuda" else f"device: got {device}, supported: an NVIDIA GPU"

    def prepare(self, rotation: Rotation) -> Prepared:
        """As `Peer.prepare`: results and scratch are allocated here."""
        launches = tuple(Ladder(self.number, copy) for copy in rotation.copies)
        gpu = Gpu.here() or H200
        predicted = ladder_model.predict(self.number, rotation.case.problem, gpu)
        notes = {
            "step": self.number,
            "splits": launches[0].splits,
            "predicted_us": predicted.us,
            "predicted_limit": predicted.limit,
        }
        return Prepared(launches, notes=notes)
