from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from mla_lab import trtllm_batch_decode_with_kv_cache_mla as decode
from mla_lab.api import context_parallel
from mla_lab.api.context_parallel import merge
from mla_lab.backends import rank_kernels
from mla_lab.bench.rank_steps import RankCases, measure
from mla_lab.core.errors import InvalidInput, InvalidType, Unsupported
from mla_lab.core.problem import Problem
from mla_lab.reference.inputs import make_inputs
from mla_lab.reference.mla import merge_partials


def partials(ranks=3, rows=5, heads=2, latent=8, dtype=torch.float32):
    """Random results of ranks; the last row of every rank is without a key, the first of one."""
    made = torch.Generator().manual_seed(0)
    outs = torch.randn(ranks, rows, heads, latent, generator=made)
    lses = 4 * torch.randn(ranks, rows, heads, generator=made)
    lses[:, -1] = lses[0, 0] = -math.inf
    outs[:, -1] = outs[0, 0] = 0.0
    return list(outs.to(dtype)), list(lses)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -9.0])])
def test_it_is_the_merge_of_the_oracle(sinks):
    outs, lses = partials()
    out, lse = merge(outs, lses, sinks=sinks)
    expected = merge_partials(torch.stack(outs).double(), torch.stack(lses).double(), sinks)
    assert torch.allclose(out.double(), expected.out, atol=1e-6)
    assert torch.allclose(lse.double(), expected.lse, atol=1e-6)
    assert not out[-1].any()
    assert lse[-1].isneginf().all()


@pytest.mark.parametrize("left", [math.nan, math.inf, 7.0])
def test_a_rank_without_keys_may_leave_anything(left):
    outs, lses = partials()
    clean = merge(outs, lses)
    for out, lse in zip(outs, lses, strict=True):
        out[lse.isneginf()] = left
    for got, expected in zip(merge(outs, lses), clean, strict=True):
        assert torch.equal(got, expected)


def test_sinks_may_be_a_list_of_one():
    outs, lses = partials()
    sinks = torch.tensor([0.5, 1.0])
    assert torch.equal(merge(outs, lses, sinks=[sinks])[0], merge(outs, lses, sinks=sinks)[0])


def test_base_2():
    outs, lses = partials()
    out, lse = merge(outs, lses)
    out2, lse2 = merge(outs, [value / math.log(2) for value in lses], lse_base="base2")
    assert torch.allclose(out2, out, atol=1e-5)
    assert torch.allclose(lse2 * math.log(2), lse, atol=1e-5)


def test_one_rank_is_the_identity():
    outs, lses = partials(ranks=1, dtype=torch.bfloat16)
    out, lse = merge(outs, lses)
    assert torch.equal(out, outs[0])
    assert torch.allclose(lse, lses[0])


def test_shapes_are_those_of_a_rank():
    outs, lses = partials(rows=6)
    out, lse = merge([o.view(3, 2, 2, 8) for o in outs], lses)
    assert out.shape == (3, 2, 2, 8)
    assert lse.shape == (6, 2)
    assert torch.equal(out.view(6, 2, 8), merge(outs, lses)[0])


OUTS, LSES = partials()
NARROW = [out.to(torch.float8_e4m3fn) for out in OUTS]
INTS = [out.int() for out in OUTS]
#: of calls [batch 2, q_len 3, heads 4], lse as some peers have it: [batch, heads, q_len]
OF_TOKENS = [torch.zeros(2, 3, 4, 8)] * 2
HEADS_FIRST = [torch.zeros(2, 4, 3)] * 2
META = [torch.zeros(5, 2, 8, device="meta")]
SINK = torch.zeros(2)


@pytest.mark.parametrize(
    ("outs", "lses", "more", "error", "says"),
    [
        ([], [], {}, InvalidInput, "lses: got 0 for 0 outs"),
        (OUTS, LSES[:2], {}, InvalidInput, "lses: got 2 for 3 outs"),
        (OUTS, [*LSES[:2], None], {}, InvalidType, "lses: got NoneType"),
        (["a"], LSES[:1], {}, InvalidType, "outs: got str"),
        (torch.stack(OUTS), LSES, {}, InvalidType, "outs: got Tensor; supported: a list"),
        (OUTS, torch.stack(LSES), {}, InvalidType, "lses: got Tensor; supported: a list"),
        (iter(OUTS), LSES, {}, InvalidType, "outs: got list_iterator"),
        ([OUTS[0].to_sparse()], LSES[:1], {}, Unsupported, "outs: got .* torch.sparse_coo"),
        ([*OUTS[:2], OUTS[2][:1]], LSES, {}, InvalidInput, "outs: got .*the same shape"),
        (OUTS, [lse[:2] for lse in LSES], {}, InvalidInput, "one value for each row and head"),
        (OUTS, LSES, {"lse_base": "base10"}, InvalidInput, "lse_base: got 'base10'"),
        (OF_TOKENS, HEADS_FIRST, {}, InvalidInput, r"lses: got shape \[2, 4, 3\] .*\[6, 4\] or"),
        (OUTS, [lse.T.contiguous() for lse in LSES], {}, InvalidInput, r"lses: got shape \[2, 5\]"),
        (OUTS, [lse.view(-1) for lse in LSES], {}, InvalidInput, r"lses: got shape \[10\]"),
        (OUTS, [lse.bfloat16() for lse in LSES], {}, InvalidType, "lses: got torch.bfloat16"),
        (INTS, LSES, {}, InvalidType, "outs: got torch.int32"),
        (NARROW, LSES, {}, InvalidType, "outs: got torch.float8_e4m3fn"),
        ([*OUTS[:2], OUTS[2].half()], LSES, {}, InvalidType, "outs: got .*the same dtype"),
        ([torch.zeros(5)], [torch.zeros(5)], {}, InvalidInput, r"outs: got shape \[5\]; .*heads"),
        ([torch.zeros(())], [torch.zeros(())], {}, InvalidInput, r"outs: got shape \[\]"),
        (META, LSES[:1], {}, InvalidInput, r"lses: got device cpu; supported: that of outs\[0\]"),
        (OUTS, LSES, {"sinks": []}, InvalidInput, "sinks: got a list of 0"),
        (OUTS, LSES, {"sinks": [SINK, SINK]}, InvalidInput, "sinks: got a list of 2"),
        (OUTS, LSES, {"sinks": [None]}, InvalidType, "sinks: got NoneType"),
        (OUTS, LSES, {"sinks": 0.5}, InvalidType, "sinks: got float"),
        (OUTS, LSES, {"sinks": SINK[:1]}, InvalidInput, r"sinks: got shape \[1\]; sup.*\[2\]"),
        (OUTS, LSES, {"sinks": torch.zeros(5, 2)}, InvalidInput, r"sinks: got shape \[5, 2\]"),
        (OUTS, LSES, {"sinks": SINK.double()}, InvalidType, "sinks: got torch.float64"),
        (OUTS, LSES, {"sinks": SINK.to("meta")}, InvalidInput, "sinks: got device meta"),
    ],
)
def test_wrong_arguments(outs, lses, more, error, says):
    with pytest.raises(error, match=says):
        merge(outs, lses, **more)


@pytest.mark.parametrize("more", [{"sinks": []}, {"lse_base": "base10"}])
def test_what_enters_the_merge_is_checked_before_anything_is_gathered(monkeypatch, more):
    monkeypatch.setattr(context_parallel, "start_gather", lambda *_, **__: pytest.fail("gathered"))
    with pytest.raises(InvalidInput, match=f"{next(iter(more))}: got"):
        context_parallel.gather_and_merge(OUTS[0], LSES[0], **more)


@pytest.mark.parametrize(
    ("group", "says"), [(None, "group: got no process group"), (5, "group: got int")]
)
def test_without_a_group_nothing_is_gathered(group, says):
    with pytest.raises((InvalidInput, InvalidType, Unsupported), match=says):
        context_parallel.gather_and_merge(OUTS[0], LSES[0], group=group)


def test_a_rank_s_own_results_are_named_as_the_call_does():
    with pytest.raises(InvalidType, match=r"^out: got NoneType"):
        context_parallel.gather_and_merge(None, LSES[0])


def test_each_rank_of_a_sharded_call_has_results_of_its_own():
    problem = Problem((2, 2), (70, 9), 4)
    inputs = make_inputs(problem, 1, ("lse", "sinks"))
    out, lse = decode(**inputs.contract_args())
    given = replace(inputs, out=torch.zeros_like(out), lse=torch.zeros_like(lse))
    ranks = context_parallel.shard(given, 2)
    outs, lses = zip(*(decode(**rank.contract_args()) for rank in ranks), strict=True)
    merged, _ = merge(outs, lses, sinks=inputs.sinks)
    assert (merged - out).abs().max() < 0.02
    assert torch.equal(given.out, torch.zeros_like(out))
    with pytest.raises(Unsupported, match="the call of a rank"):
        context_parallel.shard(ranks[0], 2)
    with pytest.raises(InvalidType, match="rank: got float"):
        context_parallel.shard_of(inputs, 2, 0.5)


@pytest.fixture
def one_process(tmp_path):
    """A group of this process alone."""
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("rows", [5, 0])
@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_what_is_gathered_is_merged_as_in_one_process(one_process, dtypes, rows):
    outs, lses = partials(ranks=1)
    out, lse = outs[0][:rows].to(dtypes[0]), lses[0][:rows].to(dtypes[1])
    expected = merge([out], [lse], sinks=SINK)
    gathered = context_parallel.gather_and_merge(out, lse, sinks=SINK)
    for got, wanted in zip(gathered, expected, strict=True):
        assert got.dtype is wanted.dtype and torch.equal(got, wanted)


@pytest.mark.parametrize("name", ["out", "lse"])
def test_nothing_that_autograd_follows_is_gathered(one_process, name):
    """A collective has no derivative: the results would be taken for constants."""
    outs, lses = partials(ranks=1)
    given = {"out": outs[0], "lse": lses[0]}
    given[name] = given[name].clone().requires_grad_()
    with pytest.raises(Unsupported, match=f"^{name}: got a tensor that autograd follows"):
        context_parallel.gather_and_merge(**given)
    with torch.no_grad():
        context_parallel.gather_and_merge(**given)


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("one_launch", [True, False])
def test_one_launch_gathers_whatever_merges(one_process, monkeypatch, one_launch, kernel):
    """The collectives are one operation where the backend has it, else one after the other: not by
    what merges, since a rank without a kernel's build would wait for two launches of the others."""
    assert not context_parallel._has_one_launch(torch.device("cpu"), None), "gloo has no launches"
    outs, lses = partials(ranks=1, dtype=torch.bfloat16)
    expected = merge(outs, lses, sinks=SINK)
    taken, gathered = [], context_parallel._gather_at_once

    def merged(outs, lses, sinks, *, base2):
        taken.append(base2)
        return context_parallel.merged_by_torch(outs, lses, sinks)

    def at_once(transfers, group):
        taken.append(len(transfers))
        return gathered(transfers, group)

    monkeypatch.setattr(rank_kernels, "can_merge", lambda *_: kernel)
    monkeypatch.setattr(rank_kernels, "merged", merged)
    monkeypatch.setattr(context_parallel, "_has_one_launch", lambda *_: one_launch)
    monkeypatch.setattr(context_parallel, "_gather_at_once", at_once)
    found = context_parallel.gather_and_merge(outs[0], lses[0], sinks=SINK)
    for got, wanted in zip(found, expected, strict=True):
        assert torch.equal(got, wanted)
    assert taken == [2] * one_launch + [False] * kernel


@pytest.mark.parametrize(
    ("more", "says"),
    [({"rounds": 0}, "rounds: got 0"), ({"graph": True}, "graph: got True with device cpu")],
)
def test_what_cannot_be_timed_is_refused(tmp_path, more, says):
    with pytest.raises(InvalidInput, match=says):
        measure(RankCases(2, "cpu", (1,), (70,), heads=4, **more), tmp_path / "ranks.jsonl")


def test_a_record_that_cannot_be_written_is_told_first(tmp_path):
    with pytest.raises(FileNotFoundError):
        measure(RankCases(2, "cpu", (1,), (70,), heads=4), tmp_path / "absent" / "ranks.jsonl")


def test_two_processes_agree_with_one(tmp_path):
    cases = RankCases(2, "cpu", (1, 3), (70,), heads=4, rounds=1)
    rows = measure(cases, tmp_path / "ranks.jsonl")
    assert [row["batch"] for row in rows] == [1, 3] and all(row["ok"] for row in rows)
    assert all(row["out_error"] < 1e-2 and row["lse_error"] < 1e-5 for row in rows)
    assert {row["kind"] for row in rows} == {"ranks"} and all(row["same_bits"] for row in rows)
    for row in rows:
        forms = {"in_order_us", "gather_us", "merge_us", "own_call_us"}
        forms |= {"halves_us"} if row["batch"] > 1 else set()
        assert forms <= set(row) and all(row[form] > 0 for form in forms)
        assert row["cards"] == ["CPU", "CPU"]


@pytest.mark.parametrize(("world", "device"), [(1, "cpu"), (99, "cuda")])
def test_a_wrong_number_of_ranks_is_refused(tmp_path, world, device):
    with pytest.raises(InvalidInput, match="world: got"):
        measure(RankCases(world, device, (1,), (9,)), tmp_path / "none.jsonl")
