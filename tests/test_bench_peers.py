"""Peers' adapters against stand-ins for their libraries, which compute what those document."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mla_lab.backends.cute.token_gather import formula_for
from mla_lab.bench.cases import Case, uniform_case
from mla_lab.bench.checks import Accuracy, compare
from mla_lab.bench.peers import Peer, all_peers, select
from mla_lab.bench.peers.flash_attention3 import FlashAttention3
from mla_lab.bench.peers.flash_mla_peer import FlashMla
from mla_lab.bench.peers.flashinfer_peer import FlashInferFa3
from mla_lab.bench.peers.ours import Ours
from mla_lab.bench.peers.plain import LOOSE_BOUND, UNUSED_PAGE, Plain, kernel_of
from mla_lab.bench.peers.torch_eager import TorchEager
from mla_lab.bench.peers.triton_baseline import TritonSplitKv
from mla_lab.bench.rotation import kv_bytes, make_rotation
from mla_lab.core.errors import InvalidInput, Unsupported
from mla_lab.core.kv_cache import gather_slots, unpack
from mla_lab.core.problem import Problem
from mla_lab.plan import KernelConfig

CASES = [
    uniform_case(3, 1, 16, 130),
    uniform_case(2, 3, 8, 64),
    Case("lengths", "test", Problem((2, 2, 2), (65, 2, 200), 4)),
]


def rotation_of(case, rotation_bytes=1):
    return make_rotation(case, rotation_bytes=rotation_bytes, workspace_bytes=1 << 20)


def attend(query, cache, pages, length, scale, causal, poison_spreads=False):
    """Plain attention of one request: query [q_len, heads, 576], pages a list, out fp32."""
    tokens = cache[pages.long()].reshape(-1, 576)
    if not poison_spreads:
        tokens = tokens[:length]
    keys = tokens.float()
    scores = torch.einsum("qhd,kd->qhk", query.float(), keys) * scale
    position = torch.arange(len(keys))
    last = (
        length - len(query) + torch.arange(len(query)) if causal else torch.full((1,), length - 1)
    )
    hidden = position > last[:, None, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("qhk,kd->qhd", weights, keys[:, :512])


def install(monkeypatch, name, **attributes):
    module = ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def accept(peer, case, launches="launches"):
    rotation = rotation_of(case, 3 * kv_bytes(case.problem) - 1)
    prepared = peer.prepare(rotation)
    assert len(rotation.copies) == 3
    pairs = zip(getattr(prepared, launches), rotation.expected, strict=True)
    assert compare((launch(), want) for launch, want in pairs).objection(case) is None
    return prepared


@pytest.fixture
def flash_mla(monkeypatch):
    """Its metadata object is filled by the first call, and each plan is counted."""
    plans = []

    def flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, metadata, *, softmax_scale, causal
    ):
        assert k_cache.shape[1:] == (64, 1, 576)
        assert head_dim_v == 512
        if not metadata:
            plans.append(1)
            metadata.append("planned")
        lengths = cache_seqlens.tolist()
        outs = [
            attend(q[b], k_cache[:, :, 0], block_table[b, : -(-n // 64)], n, softmax_scale, causal)
            for b, n in enumerate(lengths)
        ]
        return torch.stack(outs).to(q.dtype), None

    install(
        monkeypatch,
        "flash_mla",
        flash_mla_with_kvcache=flash_mla_with_kvcache,
        get_mla_metadata=lambda *args: ([], None),
        __version__="stand-in",
    )
    return plans


@pytest.fixture
def flashinfer(monkeypatch):
    class Wrapper:
        plans = 0

        def __init__(self, workspace, backend):
            assert backend == "fa3"

        def plan(self, **arguments):
            type(self).plans += 1
            self.planned = arguments
            assert arguments["head_dim_ckv"] == 512
            assert arguments["head_dim_kpe"] == 64

        def run(self, *, q_nope, q_pe, ckv_cache, kpe_cache, out):
            p = self.planned
            query = torch.cat([q_nope, q_pe], -1)
            cache = torch.cat([ckv_cache, kpe_cache], -1)
            bounds = zip(p["qo_indptr"].tolist(), p["qo_indptr"].tolist()[1:], strict=False)
            for b, (begin, end) in enumerate(bounds):
                pages = p["kv_indices"][p["kv_indptr"][b] : p["kv_indptr"][b + 1]]
                length = int(p["kv_len_arr"][b])
                out[begin:end] = attend(
                    query[begin:end], cache, pages, length, p["sm_scale"], p["causal"]
                )

    package = install(monkeypatch, "flashinfer", __version__="stand-in")
    package.mla = install(monkeypatch, "flashinfer.mla", BatchMLAPagedAttentionWrapper=Wrapper)
    return Wrapper


@pytest.fixture
def flash_attention(monkeypatch):
    def get_scheduler_metadata(
        batch, q_len, max_kv, heads, kv_heads, dim, lengths, dtype, *, headdim_v, num_splits, **more
    ):
        assert (kv_heads, dim, headdim_v) == (1, 64, 512)
        assert more["page_size"] == 64
        return ("planned", num_splits, max_kv)

    def flash_attn_with_kvcache(
        q,
        k,
        v,
        *,
        qv,
        cache_seqlens,
        page_table,
        softmax_scale,
        causal,
        scheduler_metadata,
        num_splits,
    ):
        if scheduler_metadata is not None:
            planned = ("planned", num_splits, page_table.shape[1] * k.shape[1])
            assert scheduler_metadata == planned, "made for this table's width"
        query, cache = torch.cat([qv, q], -1), torch.cat([v, k], -1)[:, :, 0]
        outs = [
            attend(query[b], cache, page_table[b, : -(-n // 64)], n, softmax_scale, causal, True)
            for b, n in enumerate(cache_seqlens.tolist())
        ]
        return torch.stack(outs).to(q.dtype)

    install(
        monkeypatch,
        "flash_attn_interface",
        flash_attn_with_kvcache=flash_attn_with_kvcache,
        get_scheduler_metadata=get_scheduler_metadata,
    )


def test_flash_mla_over_tokens_of_656_bytes(monkeypatch):
    """A stand-in that computes what FlashMLA documents; 20 heads are padded to 64."""
    seen = []

    def flash_mla_with_kvcache(
        q, k_cache, table, lengths, latent, metadata, *, softmax_scale, is_fp8_kvcache, indices
    ):
        assert (table, lengths, latent, is_fp8_kvcache) == (None, None, 512, True)
        seen.append(tuple(q.shape))
        keys = unpack(gather_slots(k_cache[:, :, 0], indices.clamp_min(0)), torch.float32)
        scores = torch.einsum("bqhd,bqkd->bqhk", q.float(), keys) * softmax_scale
        hidden = (indices < 0).unsqueeze(2)
        keys = keys.masked_fill((indices < 0).unsqueeze(-1), 0.0)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num()
        return torch.einsum("bqhk,bqkd->bqhd", weights, keys[..., :512]).bfloat16(), None

    def metadata():
        return object(), None

    install(
        monkeypatch,
        "flash_mla",
        flash_mla_with_kvcache=flash_mla_with_kvcache,
        get_mla_metadata=metadata,
    )
    case = uniform_case(2, 2, 20, 90, kv_format="fp8_656", top_k=40)
    prepared = accept(FlashMla(), case)
    assert set(seen) == {(2, 2, 64, 576)}
    assert prepared.allowance > 0
    assert "sinks" in str(FlashMla().refuses(replace(case, features=("sinks",))))
    assert "up to 128" in str(
        FlashMla().refuses(uniform_case(1, 1, 130, 64, kv_format="fp8_656", top_k=32))
    )
    assert "batch_invariant" in str(FlashMla().refuses(replace(case, batch_invariant=True)))


def test_flash_mla_over_lists_of_bf16_tokens(monkeypatch):
    """A stand-in that computes what `flash_mla_sparse_fwd` documents; 20 heads are padded to 64."""
    seen = []

    def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v):
        seen.append((tuple(q.shape), tuple(indices.shape)))
        hidden = indices < 0  # [tokens, 1, slots]
        keys = kv[indices.clamp_min(0)[:, 0].long(), 0].float()
        keys = keys.masked_fill(hidden[:, 0, :, None], 0.0)
        scores = torch.einsum("qhd,qkd->qhk", q.float(), keys) * sm_scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num()
        return torch.einsum("qhk,qkd->qhd", weights, keys[..., :d_v]).bfloat16(), None, None

    install(monkeypatch, "flash_mla", flash_mla_sparse_fwd=flash_mla_sparse_fwd)
    case = uniform_case(2, 2, 20, 90, top_k=128)
    prepared = accept(FlashMla(), case)
    assert set(seen) == {((4, 64, 576), (4, 1, 128))}
    assert prepared.allowance == 0
    assert "multiples of 128" in str(FlashMla().refuses(uniform_case(2, 2, 20, 90, top_k=40)))
    fp16 = uniform_case(2, 2, 20, 90, q_dtype="fp16", kv_format="fp16", top_k=128)
    assert "supported: bf16 over fp8_656, bf16 over bf16" in str(FlashMla().refuses(fp16))


def test_what_a_peers_own_rounding_adds_is_allowed():
    case = uniform_case(1, 1, 4, 8)
    off = Accuracy(rel_error=7e-3, worst_row=7e-3, nonfinite=0)
    assert "relative error" in str(off.objection(case))
    assert off.objection(case, None, 4e-3) is None
    assert "relative error" in str(off.objection(case, None, 1e-3))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_flash_mla(flash_mla, case):
    prepared = accept(FlashMla(), case)
    assert len(flash_mla) == 1, "copies share one plan"
    for launch in prepared.planned_launches:
        launch()
    assert len(flash_mla) == 4, "and these plan in every call"
    accept(FlashMla(), case, "planned_launches")


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_flashinfer(flashinfer, case):
    prepared = accept(FlashInferFa3(), case)
    assert flashinfer.plans == 1
    assert prepared.plan is not None
    prepared.plan()
    assert flashinfer.plans == 2


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("splits", [0, 32])
def test_flash_attention_3(flash_attention, case, splits):
    prepared = accept(FlashAttention3(splits), case)
    assert prepared.notes["inputs"] == "without poison"
    accept(FlashAttention3(splits), case, "planned_launches")


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize(
    "peer",
    [TorchEager(), Ours("torch"), Ours(), Plain(), Plain(tight=True)],
    ids=lambda p: p.name,
)
def test_peers_of_this_package(peer, case):
    assert peer.available(torch.device("cpu")) is None
    assert peer.refuses(case) is None
    accept(peer, case)


def test_the_plain_call_has_no_plan_a_loose_bound_and_other_lengths_while_it_is_captured(
    monkeypatch,
):
    given = []
    monkeypatch.setattr(
        "mla_lab.bench.peers.plain.decode.decode", lambda **arguments: given.append(arguments)
    )
    rotation = rotation_of(CASES[0], 2 * kv_bytes(CASES[0].problem))
    prepared = Plain().prepare(rotation)
    assert prepared.plan is None and prepared.planned_launches is None
    with prepared.captured():
        prepared.launches[0]()
        assert given[0]["seq_lens"].unique().tolist() == [1]
    assert given[0].get("plan") is None and given[0]["max_seq_len"] == LOOSE_BOUND
    assert torch.equal(given[0]["seq_lens"], rotation.copies[0].seq_lens)
    assert prepared.other_lengths is not None
    prepared.other_lengths[0]()
    shorter = given.pop()["seq_lens"]
    assert torch.equal(shorter, rotation.copies[0].seq_lens - 1), "no launch finds its lengths kept"
    table, page = given[0]["block_tables"], CASES[0].problem.page_size
    assert table.shape[1] * page >= LOOSE_BOUND and (table[:, -1] == UNUSED_PAGE).all()
    prepared.launches[-1]()
    caches = {each["kv_cache"].data_ptr() for each in given}
    assert len(caches) > 1 and given[1]["block_tables"] is table, "the layers of a step share it"
    Plain(tight=True).prepare(rotation).launches[0]()
    assert given[2]["max_seq_len"] == max(CASES[0].problem.kv_lens)


def test_a_plain_row_names_the_kernel_that_short_enough_requests_take():
    long, short = (KernelConfig("cute/swap_ab_sm90", tile_rows=rows) for rows in (32, 64))
    one = SimpleNamespace(config=short, before=None)
    assert kernel_of(one) == {"kernel": short.name(), "tile_rows": 64}
    assert kernel_of(SimpleNamespace(config=long, before=one)) == kernel_of(one)
    assert kernel_of(SimpleNamespace()) == {}, "a plan of the torch backend has none"


def test_ours_brings_a_plan_and_says_what_it_chose():
    prepared = Ours("torch").prepare(rotation_of(CASES[0]))
    assert prepared.plan is not None
    assert prepared.plan().problem == CASES[0].problem
    assert prepared.notes["backend"] == "torch"
    assert prepared.notes["tiles"] > 0


def test_tokens_that_are_fetched_go_without_a_plan(monkeypatch):
    case = uniform_case(2, 1, 128, 300, top_k=128)

    class Cute:
        name = "cute"

        def plan(self, call, gpu):
            return formula_for(case.problem, call, gpu, batch_invariant=False)

    total_q = case.problem.total_q
    validate = "mla_lab.bench.peers.ours.decode.prepare"
    monkeypatch.setattr(validate, lambda *_: (total_q, Cute()))
    prepared = Ours().prepare(rotation_of(case))
    assert prepared.plan is None and prepared.planned_launches is None and prepared.launches
    assert prepared.notes["tile_rows"] == 64 and "gather2" in prepared.notes["kernel"]


def test_ours_refuses_with_the_backend_s_reason():
    assert "no_such" in str(Ours("no_such").available(torch.device("cpu")))
    with pytest.raises((Unsupported, InvalidInput)):
        Ours("cuda").prepare(rotation_of(CASES[0]))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (uniform_case(1, 1, 16, 64, q_dtype="fp16", kv_format="fp16", top_k=32), "sparse"),
        (uniform_case(1, 1, 16, 64, kv_format="fp8_656"), "dtypes"),
        (replace(CASES[0], features=("sinks",)), "sinks"),
        (replace(CASES[0], batch_invariant=True), "batch_invariant"),
    ],
)
def test_others_refuse_what_they_do_not_know(case, words):
    others: list[Peer] = [
        TorchEager(),
        TritonSplitKv(),
        FlashMla(),
        FlashInferFa3(),
        FlashAttention3(),
    ]
    assert all(words in str(peer.refuses(case)) for peer in others)


def test_refusals_of_one_library():
    ragged = Case("q", "test", Problem((1, 2), (64, 64), 16))
    small_pages = uniform_case(1, 1, 16, 64, page_size=32)
    assert "q_lens" in str(FlashMla().refuses(ragged))
    assert FlashInferFa3().refuses(ragged) is None
    assert "page_size: got 32, supported: 64" in str(FlashMla().refuses(small_pages))
    assert FlashAttention3().refuses(small_pages) is None


def test_a_peer_that_is_not_there_says_why(monkeypatch):
    assert "an NVIDIA GPU" in str(FlashMla().available(torch.device("cpu")))
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    assert "import flash_mla" in str(FlashMla().available(torch.device("cuda")))


def test_names_are_unique_and_selectable():
    names = [peer.name for peer in all_peers()]
    assert len(set(names)) == len(names)
    assert [p.name for p in select(["flashmla", "torch-eager"])] == ["flashmla", "torch-eager"]
    assert [p.name for p in select([])] == names
    with pytest.raises(InvalidInput, match="nobody"):
        select(["nobody"])


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("peer", all_peers(), ids=lambda p: p.name)
def test_peers_on_the_gpu(peer, case):
    device = torch.device("cuda")
    if reason := peer.available(device) or peer.refuses(case):
        pytest.skip(reason)
    rotation = make_rotation(case, device=device, rotation_bytes=1 << 20)
    try:
        prepared = peer.prepare(rotation)
    except Unsupported as refusal:
        pytest.skip(str(refusal))
    pairs = zip(prepared.launches, rotation.expected, strict=True)
    assert compare((launch(), want) for launch, want in pairs).objection(case) is None


INTERPRETED = """
import sys, torch
from mla_lab.bench.cases import Case, uniform_case
from mla_lab.bench.checks import compare
from mla_lab.bench.peers.triton_baseline import TritonSplitKv
from mla_lab.bench.rotation import make_rotation
from mla_lab.core.problem import Problem

half = dict(q_dtype="fp16", kv_format="fp16")  # the interpreter multiplies no bf16
small = Case("small", "test", Problem((2, 2), (65, 1), 24, **half))
for case in (uniform_case(2, 1, 16, 600, **half), small):
    rotation = make_rotation(case, rotation_bytes=1)
    prepared = TritonSplitKv().prepare(rotation)
    pairs = zip(prepared.launches, rotation.expected, strict=True)
    objection = compare((launch(), want) for launch, want in pairs).objection(case)
    sys.exit(objection) if objection else print(prepared.notes)
"""


def test_the_triton_baseline_by_its_interpreter():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "'num_splits': 3" in done.stdout


#: features one at a time, other inputs, and other formats, of a small call with four query tokens
SMALL = uniform_case(2, 4, 4, 130)
FEATURES = ("lse", "sinks", "chain_mask", "tree_mask", "ragged", "max_q_len", "device_scales",
            "page_gap", "separate_tables", "cache_4d")  # fmt: skip
VARIANTS = [
    *(replace(SMALL, name=feature, features=(feature,)) for feature in FEATURES),
    replace(SMALL, name="batch_invariant", batch_invariant=True),
    replace(SMALL, name="heavy_tailed", distribution="heavy_tailed"),
    uniform_case(2, 4, 4, 130, kv_format="fp8_656"),
    uniform_case(2, 4, 4, 130, kv_format="e4m3"),
    uniform_case(2, 4, 4, 130, q_dtype="e4m3", kv_format="e4m3"),
    uniform_case(2, 4, 4, 130, q_dtype="fp16", kv_format="fp16", out_dtype="fp16"),
    uniform_case(2, 4, 4, 130, top_k=32),
]


@pytest.mark.parametrize("case", VARIANTS, ids=lambda c: c.name)
def test_every_feature_runs_and_is_right(case):
    accept(Ours("torch"), case)
