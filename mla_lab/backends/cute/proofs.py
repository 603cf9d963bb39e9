"""Passed proofs of the SM100 kernel, as the user's cache directory remembers them.

    ROOT/proofs/sm100-DIGEST.json    one passed `mla-lab doctor --prove` of one identity

A proof counts where everything that it was made with is there again: the card, its compute
capability, the version of this package, the kernel's sources and the version of the DSL that
compiles them ("none" where builds come compiled). Files that another user could have written do not
count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ...core.errors import BuildError, InvalidInput, invalid
from ...core.files import check, read_json, replacing
from ...core.gpu import Gpu
from ...core.installed import version_of
from ...core.version import __version__
from ...jit.arch import CAPABILITIES
from ...jit.cache import check_private, default_root, private_folder
from ...jit.source import source_hash
from .families import SM100

DSL = "nvidia-cutlass-dsl"
#: bytes of a remembered proof at most
MAX_BYTES = 1 << 16
KEYS = {"identity": dict, "passed": bool, "cases": int, "date": str}


@dataclass(frozen=True)
class Identity:
    """What a proof holds for."""

    card: str
    sms: int
    capability: str
    mla_lab: str
    #: hash of the kernel's sources
    sources: str
    dsl: str

    @classmethod
    def of(cls, gpu: Gpu) -> Identity:
        """Of this card with the package and the compiler that are installed."""
        return cls(
            card=gpu.name,
            sms=gpu.sms,
            capability=capability(gpu),
            mla_lab=__version__,
            sources=source_hash(SM100.kernel),
            dsl=version_of(DSL) or "none",
        )

    @property
    def file(self) -> Path:
        """Where a passed proof of it is remembered."""
        digest = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]
        return folder() / f"sm100-{digest}.json"


def arch(gpu: Gpu) -> str:
    """The architecture that kernels are compiled for on the card, e.g. sm_103a of "sm_103"."""
    return gpu.arch.removesuffix("a") + "a"


def capability(gpu: Gpu) -> str:
    """Compute capability of a card, e.g. "10.0"; InvalidInput for one that nothing is built for."""
    found = CAPABILITIES.get(arch(gpu), CAPABILITIES.get(gpu.arch))
    if found is None:
        raise invalid("gpu", gpu.arch, tuple(CAPABILITIES))
    return f"{found[0]}.{found[1]}"


def folder() -> Path:
    """The folder of remembered proofs."""
    return default_root() / "proofs"


def remember(identity: Identity, facts: Mapping[str, object]) -> Path:
    """Leaves a passed proof of `identity`; `facts` has at least `cases` and `date`.

    Raises BuildError where the cache directory cannot be written, or others may write it.
    """
    try:
        default_root().mkdir(mode=0o700, parents=True, exist_ok=True)
        private_folder(default_root())
        folder().mkdir(mode=0o700, exist_ok=True)
        check_private(folder())
        with replacing(identity.file) as file:
            value = {"identity": asdict(identity), "passed": True, **facts}
            file.write(json.dumps(value, indent=1).encode())
        identity.file.chmod(0o600)
    except OSError as error:
        raise BuildError(
            f"cache: {folder()} cannot be written ({error.strerror}); set MLA_LAB_CACHE_DIR to a "
            "directory of your own"
        ) from error
    return identity.file


def forget(identity: Identity) -> None:
    """Removes what is remembered of `identity`, as the beginning of a new proof does."""
    identity.file.unlink(missing_ok=True)


def counts(gpu: Gpu) -> bool:
    """Whether a passed proof of this card, package and compiler is remembered."""
    if not folder().is_dir():
        return False
    identity = Identity.of(gpu)
    try:
        private_folder(default_root())
        check_private(folder())
        check_private(identity.file)
        found = check(read_json(identity.file, "proof", MAX_BYTES), KEYS, "proof")
    except (BuildError, InvalidInput, OSError):
        return False
    return found["passed"] is True and found["identity"] == asdict(identity)
