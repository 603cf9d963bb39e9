"""SGLang's backend over our call on a CPU: its registry, its KV pool, its forward modes; skipped
where SGLang does not import.
"""

from __future__ import annotations

import tomllib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_lab.core.errors import Unsupported
from mla_lab.core.problem import Problem
from mla_lab.interop.engines import sglang_plugin
from mla_lab.interop.engines import step as engine
from mla_lab.reference.inputs import DecodeInputs, make_inputs
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import rel_error

from .absent import stand_in
from .house import ROOT

LENS = (70, 9, 33)
#: slots of a request: SGLang's pools have some more than the model's context
CONTEXT, SLOTS = 128, (128, 132, 199)


def test_the_entry_point_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["entry-points"]["sglang.srt.plugins"]
    assert declared == {"mla_lab": "mla_lab.interop.engines.sglang_plugin:register"}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's modules, with one rank and no drafts; its servers publish these contexts."""
    stand_in("torchvision")  # of its image models alone
    pytest.importorskip("sglang.srt.layers.attention.attention_registry", exc_type=ImportError)
    from sglang.srt.mem_cache import memory_pool

    from mla_lab.interop.engines import sglang_mla

    monkeypatch.setattr(engine, "WORKSPACE_BYTES", 16 << 20)
    monkeypatch.setattr(engine, "_WORKSPACES", {})
    spec = SimpleNamespace(
        speculative_num_draft_tokens=None,
        speculative_eagle_topk=None,
        speculative_attention_mode="decode",
    )
    parallel = SimpleNamespace(dcp_enabled=False)
    monkeypatch.setattr(sglang_mla, "get_spec", lambda: spec)
    for module in (sglang_mla, memory_pool):
        monkeypatch.setattr(module, "get_parallel", lambda: parallel)
    return SimpleNamespace(spec=spec, parallel=parallel, mla=sglang_mla)


@pytest.mark.filterwarnings("ignore")
def test_the_registry_has_it_once(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import plugins
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    point = SimpleNamespace(
        name="mla_lab", value="", dist=None, load=lambda: sglang_plugin.register
    )
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point])
    for _ in range(2):
        monkeypatch.setattr(plugins, "_plugins_loaded", False)
        plugins.load_plugins()
    assert ATTENTION_BACKEND_CHOICES.count("mla_lab") == 1
    made = ATTENTION_BACKENDS["mla_lab"](_runner(make_inputs(Problem((1,), (9,), 2), 0)))
    assert isinstance(made, modules.mla.MlaLabBackend)


def _runner(
    inputs: DecodeInputs, dtype: torch.dtype = torch.bfloat16, slots_of_one: int = CONTEXT
) -> Any:
    """A model runner's parts: SGLang's own pool with the inputs' pages, and slots of requests."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    page = inputs.problem.page_size
    pages = len(inputs.kv_cache)
    size = (pages - 1) * page
    pool = MLATokenToKVPool(size, page, dtype, 512, 64, 1, "cpu", False)
    pool.kv_buffer[0].view(pages, page, 576).copy_(inputs.kv_cache.view(pages, page, 576))
    batch = inputs.problem.batch
    slots = torch.zeros(batch + 2, slots_of_one, dtype=torch.int32)
    for row, table, length in zip(
        slots[2:], inputs.block_tables, inputs.problem.kv_lens, strict=True
    ):
        at = torch.arange(length)
        row[:length] = table[at // page] * page + at % page
    config = SimpleNamespace(kv_lora_rank=512, qk_rope_head_dim=64, dtype=torch.bfloat16)
    return SimpleNamespace(
        use_mla_backend=True,
        device="cpu",
        page_size=page,
        kv_cache_dtype=dtype,
        model_config=config,
        token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(req_to_token=slots),
    )


def _batch(inputs: DecodeInputs, mode: Any, drafts: int = 0) -> Any:
    batch = inputs.problem.batch
    return SimpleNamespace(
        batch_size=batch,
        forward_mode=mode,
        seq_lens=inputs.seq_lens.long() - drafts,
        req_pool_indices=torch.arange(2, batch + 2),
    )


def _layer(inputs: DecodeInputs) -> Any:
    heads, scale = inputs.problem.heads, float(inputs.bmm1_scale)
    return SimpleNamespace(layer_id=0, tp_q_head_num=heads, scaling=scale, k_scale_float=None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("slots", SLOTS)
def test_steps_are_the_oracle_s(modules: Any, graph: bool, drafts: int, slots: int) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    modules.spec.speculative_num_draft_tokens = drafts or None
    rows = drafts or 1
    inputs = make_inputs(Problem((rows,) * 3, LENS, 4, page_size=16), 1)
    backend = modules.mla.MlaLabBackend(_runner(inputs, slots_of_one=slots))
    mode = ForwardMode.TARGET_VERIFY if drafts else ForwardMode.DECODE
    batch = _batch(inputs, mode, drafts)
    if graph:
        backend.init_cuda_graph_state(8, 8 * rows)
        shorter = replace(inputs, seq_lens=inputs.seq_lens.clamp_max(8))
        backend.init_forward_metadata_out_graph(_batch(shorter, mode, drafts), in_capture=True)
        kept = backend.forward_metadata
        backend.init_forward_metadata_out_graph(batch)
        for name in ("block_table", "seq_lens", *(("query_start_loc",) if drafts else ())):
            new, old = getattr(backend.forward_metadata, name), getattr(kept, name)
            assert new.data_ptr() == old.data_ptr(), "a captured step's tensors stay where they are"
    else:
        backend.init_forward_metadata(batch)
    out = backend.forward(inputs.query, None, None, _layer(inputs), batch)
    expected = decode_reference(inputs).out
    assert out.shape == (3 * rows, 4 * 512)
    assert rel_error(out.view(expected.shape), expected) < 4e-3


@pytest.mark.filterwarnings("ignore")
def test_a_step_writes_its_token(modules: Any) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    inputs = make_inputs(Problem((1,) * 3, LENS, 4, page_size=16), 1)
    runner = _runner(inputs)
    backend = modules.mla.MlaLabBackend(runner)
    batch = _batch(inputs, ForwardMode.DECODE)
    slots = runner.req_to_token_pool.req_to_token[2:].gather(1, inputs.seq_lens.long()[:, None] - 1)
    batch.out_cache_loc, batch.out_cache_loc_is_physical = slots[:, 0].long(), False
    token = torch.randn(3, 1, 576).bfloat16()
    backend.init_forward_metadata(batch)
    backend.forward(inputs.query, token, token[..., :512], _layer(inputs), batch)
    assert torch.equal(runner.token_to_kv_pool.kv_buffer[0][batch.out_cache_loc], token)


@pytest.mark.filterwarnings("ignore")
def test_what_it_can_not_do_is_refused(modules: Any) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    inputs = make_inputs(Problem((1,) * 3, LENS, 4, page_size=16), 1)
    runner = _runner(inputs)
    backend = modules.mla.MlaLabBackend(runner)
    batch = _batch(inputs, ForwardMode.EXTEND)
    with pytest.raises(Unsupported, match="another prefill backend"):
        backend.forward(inputs.query, None, None, _layer(inputs), batch)
    with pytest.raises(Unsupported, match="page-size"):
        modules.mla.MlaLabBackend(SimpleNamespace(**{**vars(runner), "page_size": 1}))
    modules.parallel.dcp_enabled = True
    with pytest.raises(Unsupported, match="dcp-size"):
        modules.mla.MlaLabBackend(runner)
    modules.parallel.dcp_enabled = False
    modules.spec.speculative_eagle_topk = 4
    with pytest.raises(Unsupported, match="eagle-topk"):
        modules.mla.MlaLabBackend(runner)
    modules.spec.speculative_num_draft_tokens = 3
    modules.spec.speculative_attention_mode = "prefill"
    with pytest.raises(Unsupported, match="attention-mode"):
        modules.mla.MlaLabBackend(runner)
    modules.spec.speculative_num_draft_tokens = None
    for dtype in (torch.float16, torch.float8_e5m2):
        with pytest.raises(Unsupported, match="kv-cache-dtype"):
            modules.mla.MlaLabBackend(SimpleNamespace(**{**vars(runner), "kv_cache_dtype": dtype}))


@pytest.mark.filterwarnings("ignore")
def test_a_scale_that_tokens_were_not_divided_by_is_refused(modules: Any) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    inputs = make_inputs(Problem((1,) * 3, LENS, 4, page_size=16), 1)
    backend = modules.mla.MlaLabBackend(_runner(inputs, torch.float8_e4m3fn))
    batch, layer = _batch(inputs, ForwardMode.DECODE), _layer(inputs)
    backend.init_forward_metadata(batch)
    layer.k_scale_float = 2.0
    with pytest.raises(Unsupported, match="k_scale"):
        backend.forward(inputs.query, None, None, layer, batch)
    layer.k_scale_float = 1.0
    backend.forward(inputs.query, None, None, layer, batch)
