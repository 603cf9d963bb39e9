"""FlashInfer's published tests of MLA decode on `mla_lab.flashinfer_names`.

    python -m mla_lab.verify.flashinfer_tests CHECKOUT RECORD

runs the files of `FILES` from a checkout of FlashInfer (a git repository or its folder) on a card,
unchanged; FlashInfer itself is not imported. `data/notes/dropin.md` says what stands in the place
of its modules: our names; a reference in float64 (`ReferenceWrapper`); guards on the device's
compute capability that hold everywhere; our own bytes of workspace. A test that imports any other
part of FlashInfer is skipped, with that module as the reason.
"""

from __future__ import annotations

import math
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import ANY, patch

import pytest
import torch
from torch import Tensor

from .. import backends
from ..core.errors import invalid, unsupported
from ..interop import flashinfer
from ..plan.policies import simplified_splits
from ..reference.mla import attend
from ..reference.operands import Operands
from .peer_tests import SEED, file_of, main, of_this_run
from .record import Row

FOLDER = Path("tests", "attention")
FILES = (
    "test_trtllm_gen_mla.py",
    "test_cute_dsl_mla_decode.py",
    "test_cute_dsl_mla_dcp.py",
    "test_xqa_mla_batch_decode.py",
    "test_xqa_mla_bf16.py",
)
#: a test with more parametrisations than MANY runs the square root of their number, LEAST at least
MANY, LEAST = 64, 32
#: bytes of workspace that the stand-in of FlashInfer's private sizer returns; tests that assert its
#: own bytes, and why they are skipped
SIZER_BYTES = 64 << 20
SIZER_TESTS = (
    "test_cute_dsl_mla_decode_padded_q_tile_direct_output",
    "test_flat_q_tile_split_workspace_geometry",
    "test_h96_sq8_split_workspace_drops_empty_partition",
)
ASSERTS_BYTES = "asserts the bytes of FlashInfer's private workspace sizer"
#: of FlashInfer's guards, what holds here
GUARDS = (
    "is_cute_dsl_available", "is_cute_dsl_arch_supported", "is_sm100a_supported",
    "is_sm110a_supported", "is_sm12x_supported", "device_support_pdl",
)  # fmt: skip
#: rows, and keys, of a tile of FlashInfer's CuTe DSL kernel, by which it counts splits
TILE = 128
#: function of a test file that gives the end of FlashInfer's softmax slab in a workspace, behind
#: which a test expects zeros; constants of that file: bytes of the workspace, and of those zeros
SLAB_END = "trtllm_gen_workspace_softmax_end_bytes_decode"
WORKSPACE, ZEROS = "workspace_size", "TRTLLM_GEN_WORKSPACE_CHECK_BYTES"


class ReferenceWrapper:
    """`BatchMLAPagedAttentionWrapper` by its definition, in float64: what tests compare with."""

    def __init__(self, workspace_buffer: Tensor, backend: str = "auto") -> None:
        del workspace_buffer, backend
        self._planned: tuple[list[int], list[int], Tensor, list[int], int, bool, float]

    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_lens: Tensor,
        *layer: Any,
    ) -> None:  # fmt: skip
        """`layer`: heads, latent and rope channels, page size, causal, scale, dtypes."""
        _, _, _, page_size, causal, scale, *_ = layer
        self._planned = (
            qo_indptr.tolist(), kv_indptr.tolist(), kv_indices, kv_lens.tolist(),
            page_size, causal, scale,
        )  # fmt: skip

    def run(
        self, q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor, return_lse: bool = False
    ) -> Tensor:
        """Rows [total_q, heads, latent] in the dtype of the query."""
        if return_lse:
            raise unsupported("return_lse", return_lse, False)
        q_begin, page_begin, pages, kv_lens, page_size, causal, scale = self._planned
        out = torch.zeros_like(q_nope)
        for i, length in enumerate(kv_lens):
            rows = slice(q_begin[i], q_begin[i + 1])
            number = rows.stop - rows.start
            if not number or not length:
                continue
            own = pages[page_begin[i] : page_begin[i] + -(-length // page_size)].long()
            latent, rope = (t[own].flatten(0, 1)[None, :length].double() for t in (ckv, kpe))
            query = torch.cat((q_nope[rows], q_pe[rows]), -1).double()
            seen = torch.arange(length, device=query.device).expand(number, 1, -1)
            last = length - number + torch.arange(number, device=query.device) if causal else length
            visible = seen <= torch.as_tensor(last, device=query.device).view(-1, 1, 1)
            request = Operands(query, torch.cat((latent, rope), -1), latent, visible)
            out[rows] = attend(request, scale).out.to(out.dtype)
        return out


def splits_and_bytes(
    batch: int, q_len: int, heads: int, latent: int, sms: int, max_seq_len: int | None = None,
    q_tiles: int | None = None,
) -> tuple[int, int]:  # fmt: skip
    """Stand-in of the private sizer of FlashInfer's CuTe DSL decode: the splits that it would have,
    without empty ones, and bytes of a workspace for ours."""
    del latent
    tiles = q_tiles or batch * -(-q_len * heads // TILE)
    splits = simplified_splits(1, tiles, sms)
    if max_seq_len is not None:
        key_tiles = -(-max_seq_len // TILE)
        splits = -(-key_tiles // -(-key_tiles // splits))
    return splits, SIZER_BYTES


def sms_of(device: torch.device) -> int:
    """Number of SMs."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def holds(*_: object, **__: object) -> bool:
    """A guard that holds."""
    return True


def counter_bytes(batch: int, heads: int, sms: int) -> int:
    """Of FlashInfer's counters: a word for each head of each request, one an SM at least, by
    eights."""
    return 4 * 8 * -(-max(batch * heads, sms) // 8)


def any_capability(device: object) -> tuple[Any, Any]:
    """A compute capability that equals each one that a test's guards compare it with: FlashInfer's
    kernels differ by architecture, the names here do not."""
    del device
    return ANY, ANY


def stand_ins() -> dict[str, ModuleType]:
    """Modules for `sys.modules` in the place of FlashInfer's, by name."""
    names = {
        name: getattr(flashinfer, name)
        for name in flashinfer.__all__
        if name not in ("mla", "decode")
    } | {"BatchMLAPagedAttentionWrapper": ReferenceWrapper}
    decode = {"cute_dsl_mla_decode": flashinfer.cute_dsl_mla_decode}
    utils: dict[str, Any] = dict.fromkeys(GUARDS, holds) | {
        "get_compute_capability": any_capability,
        "get_device_sm_count": sms_of,
        "get_num_sm": sms_of,
        "get_trtllm_gen_multi_ctas_kv_counter_bytes": counter_bytes,
    }
    cute_dsl = "flashinfer.cute_dsl"
    parts: dict[str, dict[str, Any]] = {
        "flashinfer": {},
        "flashinfer.mla": names,
        "flashinfer.decode": names,
        "flashinfer.utils": utils,
        cute_dsl: utils,
        f"{cute_dsl}.utils": utils,
        f"{cute_dsl}.attention": decode,
        f"{cute_dsl}.attention.monolithic": {},
        f"{cute_dsl}.attention.monolithic.mla_decode": {
            **decode, "_get_split_kv_and_workspace_size": splits_and_bytes,
        },
    }  # fmt: skip
    made = {name: ModuleType(name) for name in parts}
    for name, module in made.items():
        module.__dict__.update(parts[name], __path__=[])
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(made[parent], own, module)
    return made


def lacking(error: BaseException) -> str | None:
    """Why a test is skipped that imports what no module here stands in for; None for others, and
    where a module of ours fails to import.
    """
    if not isinstance(error, ImportError) or not error.name:
        return None
    package = error.name.partition(".")[0]
    if package == __name__.partition(".")[0]:
        return None
    if package == "flashinfer":
        return f"needs FlashInfer's own {error.name}"
    return f"needs the kernel classes of FlashInfer, and {error.name}"


class Collector:
    """Pytest's hooks: a seeded sample of each test's parametrisations; a row for each that ran."""

    def __init__(self, progress: Callable[[str], None], part: int = 0, parts: int = 1) -> None:
        self.there: Counter[str] = Counter()
        self.rows: list[Row] = []
        self._progress, self._part, self._parts = progress, part, parts
        self._chosen: list[str] = []
        self._began = 0.0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Draw, keep this part's, and end each file's slab where our partials do not reach."""
        tests: dict[str, list[pytest.Item]] = {}
        for item in items:
            tests.setdefault(f"{item.path.name}::{_name(item)}", []).append(item)
        draw = random.Random(SEED)
        drawn: list[pytest.Item] = []
        for name, own in tests.items():
            self.there[name] = len(own)
            if len(own) > MANY:
                number = max(LEAST, math.isqrt(len(own)))
                own = [own[i] for i in sorted(draw.sample(range(len(own)), number))]
            drawn += own
        drawn = drawn[self._part :: self._parts]
        for item in drawn:
            module = getattr(item, "module", None)
            if hasattr(module, SLAB_END):
                end = getattr(module, WORKSPACE) - getattr(module, ZEROS)
                setattr(module, SLAB_END, lambda *_, end=end: end)
            if _name(item) in SIZER_TESTS:
                item.add_marker(pytest.mark.skip(reason=ASSERTS_BYTES))
        items[:] = drawn

    def pytest_runtest_logstart(self) -> None:
        """Begin of a test."""
        self._chosen, self._began = [], time.monotonic()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """A row where a test's call, or its setup, has ended."""
        report = yield
        error = call.excinfo.value if call.excinfo else None
        if report.when == "call" or (report.when == "setup" and error is not None):
            status: str = report.outcome
            reason = lacking(error) if error else ""
            if reason:
                status = "skipped"
            elif error:
                reason = _first_line(error, skipped=status == "skipped")
            self.rows.append({
                "kind": "case", "file": item.path.name, "test": _name(item),
                "parameters": item.name.removeprefix(_name(item))[1:-1], "status": status,
                "reason": reason, "backends": sorted(set(self._chosen)),
                "seconds": round(time.monotonic() - self._began, 3),
            })  # fmt: skip
            self._progress(f"{len(self.rows)}: {status} {item.name} {reason}")
        return report

    def watched(self, choose: Callable[..., backends.Backend]) -> Callable[..., backends.Backend]:
        """`backends.choose`, which notes what it chose for the running test."""

        def choose_and_note(*args: Any, **kwargs: Any) -> backends.Backend:
            chosen = choose(*args, **kwargs)
            self._chosen.append(chosen.name)
            return chosen

        return choose_and_note


def _name(item: pytest.Item) -> str:
    return getattr(item, "originalname", None) or item.name


def _first_line(error: BaseException, skipped: bool) -> str:
    said = str(error).partition("\n")[0]
    return said if skipped else f"{type(error).__name__}: {said}"


def run(
    checkout: Path, commit: str, part: int, parts: int, progress: Callable[[str], None],
    files: Sequence[str] = FILES,
) -> list[Row]:  # fmt: skip
    """Rows of a record: the run, then each parametrisation that was drawn for this part.

    Raises InvalidInput for a checkout without one of the files, or with one that pytest cannot
    collect.
    """
    sources = [file_of(checkout, FOLDER / name, "FlashInfer") for name in files]
    collector = Collector(progress, part, parts)
    before = set(sys.modules)
    with tempfile.TemporaryDirectory() as folder:
        copies = [shutil.copy(source, folder) for source in sources]
        settings = Path(folder, "settings.ini")  # not those of a folder above
        settings.touch()
        options = ["-q", "-p", "no:cacheprovider", "--noconftest", "--rootdir", folder]
        sys.modules.update(stand_ins())
        try:
            with patch.object(backends, "choose", collector.watched(backends.choose)):
                code = pytest.main(
                    [*options, "-W", "ignore", "-c", str(settings), *copies], [collector]
                )
        finally:
            ours = {source.stem for source in sources}
            for name in set(sys.modules) - before:
                if name in ours or name.partition(".")[0] == "flashinfer":
                    del sys.modules[name]
    ended = {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}
    if code not in ended and not (collector.there and code == pytest.ExitCode.NO_TESTS_COLLECTED):
        raise invalid(
            "checkout", f"{checkout}: pytest ended with {code!r}", "tests that it collects"
        )
    there = {"flashinfer_commit": commit, "parametrisations": dict(collector.there)}
    return [of_this_run() | there, *collector.rows]


if __name__ == "__main__":
    main("mla_lab.verify.flashinfer_tests", __doc__, run)
