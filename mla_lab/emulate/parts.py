"""What the parts of a machine see of those that hold them.

A gang runs in a CTA, a CTA in a machine, and each reaches back. The protocols here are the upward
half, so that modules import downwards alone; the classes are `gang.Gang`, `machine.CTA`,
`machine.Machine`, `translate.Program` and `races.Checker`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from .memory import GlobalMemory, SharedMemory
from .ptx import Kernel, Place
from .writer import Writer


class ProgramLike(Protocol):
    """A translated kernel: its basic blocks, by number."""

    kernel: Kernel
    writer: Writer
    starts: list[int]
    ends: list[int]
    #: lanes that a block's instructions need together, whether it may wait, has a wgmma, may poll,
    #: asks for what others leave
    members: list[int]
    waits: list[bool]
    by_group: list[bool]
    polls: list[bool]
    asks: list[bool]
    blocks: list[Callable[..., int]]
    #: registers that each instruction names
    named: list[list[str]]


class MachineLike(Protocol):
    """What runs CTAs."""

    memory: GlobalMemory
    numbers: str
    late: bool
    checker: Any
    recorder: Any
    before_block: Callable[[Any, int], None] | None
    maps: dict[int, Any]
    clock: int
    timed: int
    progress: int
    jobs: list[Callable[[], None]]
    flops: int
    copied_bytes: int

    def later(self, land: Callable[[], None]) -> None: ...


class CtaLike(Protocol):
    """A thread block."""

    name: str
    rank: int
    num_threads: int
    shared: SharedMemory
    launch: Any
    cluster: Any
    tensor: Any
    mbarriers: dict[int, Any]
    named: dict[int, Any]
    tensor_queues: dict[int, Any]

    @property
    def machine(self) -> MachineLike: ...

    @property
    def program(self) -> ProgramLike: ...

    @property
    def peers(self) -> Sequence[CtaLike]: ...

    @property
    def gangs(self) -> Sequence[GangLike]: ...

    def constant(self, value: tuple[Any, ...]) -> Any: ...

    def special(self, name: str) -> int: ...


class GangLike(Protocol):
    """Threads that run together; `fragments` are those that have not exited."""

    name: str
    fragments: list[Any]

    @property
    def cta(self) -> CtaLike: ...


class Watcher(Protocol):
    """A checker or a recorder of a launch."""

    def begin(self, machine: Any) -> None: ...

    def finish(self, machine: Any) -> None: ...


class CheckerLike(Protocol):
    """The clocks of a launch's agents, for checks that lean on them (see `races`)."""

    machine: Any
    strict: bool
    size: int
    barriers: int
    vectors: np.ndarray
    names: dict[int, str]
    places: list[list[int]]
    recent: list[list[tuple[int, int]]]
    parts_met: list[list[tuple[int, int, int]]]

    def note(
        self, g: Any, pc: int, kind: str, text: str, others: tuple[tuple[str, Place], ...] = ()
    ) -> None: ...

    def tick(self, g: Any, pc: int, part: int = 0) -> int: ...

    def where(self, agent: int, clock: int) -> tuple[str, Any]: ...

    def learn(self, g: Any, vector: np.ndarray) -> None: ...

    def shows_barriers(self, g: Any) -> None: ...

    def product_reads(
        self, g: Any, cta: CtaLike, operands: list[np.ndarray], pc: int, clock: int
    ) -> None: ...
