"""FlashInfer's `BatchMLAPagedAttentionWrapper` on our call: plan once a step, run once a layer.

plan   host copies of the prefix sums and lengths; page lists of CSR form -> a block table
run    views of the caller's tensors -> `api.contract`; no synchronisation, and no copy where
       q_nope and q_pe, ckv and kpe, are the columns [..., :512] and [..., 512:] of one buffer
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...api import contract
from ...call.checks import tensors as argument
from ...core.errors import InvalidInput, Unsupported, invalid, under_names, unsupported
from .first_use import check_apart, clear
from .wrapper_plan import (
    Planned,
    all_drafts,
    block_table,
    check_buffer,
    check_dims,
    check_dtypes,
    check_lengths,
    check_lists,
    check_pages,
    check_results,
    check_same,
    check_tensors,
    check_workspace,
    joined,
    scales,
    side_by_side,
    steps,
    write,
)

BACKENDS = ("auto", "fa2", "fa3")
#: where the contract's list wants it; the absorbed form does not use it
NOPE_DIM = 128
#: of the contract's call: what errors name them
OUR_NAMES = {
    "workspace_buffer": "float_workspace_buffer",
    "block_tables": "kv_indices",
    "seq_lens": "kv_len_arr",
    "cum_seq_lens_q": "qo_indptr",
    "query": "q_nope and q_pe",
    "kv_cache": "ckv_cache and kpe_cache",
    "bmm1_scale": "sm_scale times ckv_scale",
    "bmm2_scale": "ckv_scale",
}
#: query tokens of a request that a mask of all drafts is made for: half a GB for one of so many
MOST_DRAFTS = (1 << 16) - 1


class BatchMLAPagedAttentionWrapper:
    """MLA attention of decode and incremental prefill over a paged cache, planned once a step.

    Ours differs from FlashInfer's wrapper in this:

    * ckv_cache and kpe_cache are read where they lie, as views of one buffer of 576 columns. Two
      buffers are refused, unless `copies_caches` permits a copy of both at each run. q_nope and
      q_pe of two buffers are copied side by side: a query is small.
    * head_dim_ckv, head_dim_kpe: (512, 64) or (256, 64). `ckv_scale_arr`, profiling and backend
      "cutlass" are refused by name. "fa2" and "fa3" count as "auto".
    * Other wrappers may use the workspace between two steps, as each `plan` zeroes its counters and
      LL partials, but not between a plan and the last of its runs.
    * Where kpe_scale and ckv_scale differ, q_pe is multiplied by their ratio, which copies it.
    * In CUDA-graph mode the block table has `pages_per_request` columns from the first plan on;
      by default the kv_indices buffer's length over the batch size. Query lengths keep the form of
      the first plan: all equal, or none above its longest. A bound of lengths for scheduling is
      then the table's capacity. Heads, sizes, dtypes and sm_scale are those of the first plan: a
      captured graph keeps them, and FlashInfer, which takes others, replays it with the old ones.
    * kv_indices on a CPU are read: an id that int32 does not hold is refused. Those on a GPU are
      not, and lose their high bits.
    * The caches come with `run`, after the workspace was zeroed: that they share no byte with it
      is up to the caller until then, and checked there.

    Raises InvalidInput (a ValueError) or Unsupported before anything is copied or launched.
    Source: flashinfer.mla.BatchMLAPagedAttentionWrapper (FlashInfer 0.7.2).
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
        *,
        copies_caches: bool = False,
        pages_per_request: int | None = None,
    ) -> None:
        """A wrapper around a workspace of 1-D uint8 or int8; with CUDA graphs, its four buffers."""
        check_workspace("float_workspace_buffer", float_workspace_buffer)
        argument.flag("use_cuda_graph", use_cuda_graph)
        argument.flag("copies_caches", copies_caches)
        if backend not in BACKENDS:
            raise unsupported("backend", repr(backend), BACKENDS)
        if pages_per_request is not None:
            argument.integer("pages_per_request", pages_per_request, 1)
        self.device = float_workspace_buffer.device
        self._workspace = float_workspace_buffer
        self._buffers = {
            "qo_indptr": qo_indptr,
            "kv_indptr": kv_indptr,
            "kv_indices": kv_indices,
            "kv_len_arr": kv_len_arr,
        }
        if use_cuda_graph:
            for name, buffer in self._buffers.items():
                check_buffer(name, buffer, self.device)
        self._use_cuda_graph = use_cuda_graph
        self._copies_caches = copies_caches
        self._pages_per_request = pages_per_request
        self._planned: Planned | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether `plan` writes into the constructor's buffers."""
        return self._use_cuda_graph

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        """Lengths, pages and numbers of one step; copies prefix sums to the host (synchronises).

        qo_indptr, kv_indptr: [batch + 1] prefix sums of query tokens and of pages; kv_indices: page
        ids, at least kv_indptr[batch]; kv_len_arr: [batch] cached tokens. Of any integer dtype and
        device. sm_scale: softmax scale, natural units. causal=False: the query tokens of a request
        see each other.
        """
        if use_profiler:
            raise unsupported("use_profiler", True, "False: mla-lab xray and bench measure")
        check_dtypes(q_data_type, kv_data_type)
        check_dims(head_dim_ckv, head_dim_kpe)
        argument.scale("sm_scale", sm_scale)
        argument.integer("num_heads", num_heads, 1)
        argument.integer("page_size", page_size, 1)
        argument.flag("causal", causal)
        given = {
            "qo_indptr": qo_indptr,
            "kv_indptr": kv_indptr,
            "kv_indices": kv_indices,
            "kv_len_arr": kv_len_arr,
        }
        check_lists(given)
        q_starts, starts = qo_indptr.tolist(), kv_indptr.tolist()
        batch, q_lens = len(q_starts) - 1, steps("qo_indptr", q_starts)
        if len(starts) <= batch:
            raise invalid("kv_indptr", f"{len(starts)} entries", f"batch + 1 = {batch + 1}")
        pages = steps("kv_indptr", starts[: batch + 1])
        kv_lens = kv_len_arr.tolist()
        check_lengths(kv_lens, pages, page_size, starts[batch], len(kv_indices))
        check_pages(kv_indices[: starts[batch]])
        numbers: dict[str, Any] = {
            "num_heads": num_heads,
            "head_dim_ckv": head_dim_ckv,
            "head_dim_kpe": head_dim_kpe,
            "page_size": page_size,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
            "sm_scale": sm_scale,
        }
        if self._use_cuda_graph:
            self._check_graph(numbers, q_lens, pages, len(kv_indices))
        drafts = self._drafts(q_lens, causal)
        buffers = [b for b in self._buffers.values() if isinstance(b, Tensor)]
        check_apart("float_workspace_buffer", self._workspace, [*given.values(), *buffers])
        given["kv_indptr"] = kv_indptr[: batch + 1]
        tensors = self._keep(given, pages)
        capacity = tensors["block_tables"].shape[1] * page_size
        clear(self._workspace)
        self._planned = Planned(
            **numbers,
            pages=starts[batch],
            total_q=q_starts[-1],
            batch=batch,
            max_seq_len=capacity if self._use_cuda_graph else max(1, *kv_lens),
            **self._kept_mask(drafts),
            **tensors,
        )

    def _drafts(self, q_lens: list[int], causal: bool) -> dict[str, Any]:
        """q_len, max_q_len and mask of a plan; with CUDA graphs in the first plan's form."""
        old = self._planned if self._use_cuda_graph else None
        longest = max(q_lens) if old is None else old.max_q_len
        equal = min(q_lens) == longest > 0 if old is None else old.q_len > 0
        mask = None
        if not causal and longest > 1:  # one query token sees the whole request in any case
            if longest > MOST_DRAFTS:
                got = f"{longest} query tokens in a request with causal=False"
                raise unsupported("qo_indptr", got, f"up to {MOST_DRAFTS}: it takes a mask of bits")
            mask = all_drafts(q_lens, longest, self.device)
        if old is not None and (mask is None) is not (old.mask is None):
            raise invalid("causal", causal, "as in the first plan, with CUDA graphs")
        return {"q_len": longest if equal else 0, "max_q_len": longest, "mask": mask}

    def _kept_mask(self, drafts: dict[str, Any]) -> dict[str, Any]:
        """`drafts`, the mask in the first plan's memory with CUDA graphs."""
        old = self._planned if self._use_cuda_graph else None
        if old is None or old.mask is None:
            return drafts
        return {**drafts, "mask": write(old.mask, drafts["mask"])}

    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        ckv_scale_arr: Tensor | None = None,
        kpe_scale: float | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """One layer of the planned step.

        q_nope: [total_q, heads, 512], q_pe: [total_q, heads, 64]; ckv_cache: [pages, page_size,
        512], kpe_cache: [pages, page_size, 64]. out: as q_nope, in its dtype; lse: fp32
        [total_q, heads], base 2, or natural with return_lse_base_on_e; a given lse is written in
        any case. ckv_scale, kpe_scale: scales of e4m3 caches, both needed there.
        Returns out, or (out, lse) with return_lse.
        """
        planned = self._planned
        if planned is None:
            raise invalid("run", "a call before plan", "plan, then run for each layer")
        refused = {
            "profiler_buffer": profiler_buffer,
            "kv_len": kv_len,
            "page_table": page_table,
            "o_scale": o_scale,
            "ckv_scale_arr": ckv_scale_arr,
        }
        for name, value in refused.items():
            if value is not None:
                raise unsupported(name, "a value", "None: it is of another backend or cache")
        check_tensors(planned, q_nope, q_pe, ckv_cache, kpe_cache)
        check_results(planned, out, lse)
        argument.flag("return_lse_base_on_e", return_lse_base_on_e)
        scale, ratio = scales(planned, ckv_scale, kpe_scale)
        cache = side_by_side(ckv_cache, kpe_cache)
        if not (len(ckv_cache) or planned.pages):
            # no request has a token, so that no page is read; a call needs one
            cache = ckv_cache.new_zeros(
                1, planned.page_size, planned.head_dim_ckv + planned.head_dim_kpe
            )
        if cache is None:
            if not self._copies_caches:
                supported = "columns [..., :512] and [..., 512:] of one buffer, or copies_caches"
                raise unsupported("ckv_cache, kpe_cache", "two buffers", supported)
            written = {"float_workspace_buffer": self._workspace, "out": out, "lse": lse}
            for name, value in written.items():
                if value is not None:
                    check_apart(name, value, [ckv_cache, kpe_cache])
            cache = joined(ckv_cache, kpe_cache)
        query = None if ratio != 1 else side_by_side(q_nope, q_pe)
        if query is None or not query.is_contiguous():
            query = torch.cat([q_nope, q_pe if ratio == 1 else q_pe * ratio], -1)
        return self._call(
            planned,
            query,
            cache,
            out=q_nope.new_empty(q_nope.shape) if out is None else out,
            lse=lse,
            return_lse=return_lse,
            return_lse_base="basee" if return_lse_base_on_e else "base2",
            bmm1_scale=planned.sm_scale * scale,
            bmm2_scale=scale,
        )

    def _call(
        self, planned: Planned, query: Tensor, cache: Tensor, *, out: Tensor, **named: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The contract's call: dense where all requests have as many query tokens, else ragged."""
        mask, shaped = planned.mask, out
        if planned.q_len:
            dense = (planned.batch, planned.q_len)
            query, shaped = query.unflatten(0, dense), out.unflatten(0, dense)
            mask = None if mask is None else mask.unflatten(0, dense)
        else:
            named |= {"cum_seq_lens_q": planned.cum_seq_lens_q, "max_q_len": planned.max_q_len}
        try:
            result = contract.trtllm_batch_decode_with_kv_cache_mla(
                query,
                cache,
                self._workspace,
                NOPE_DIM,
                planned.head_dim_ckv,
                planned.head_dim_kpe,
                planned.block_tables,
                planned.seq_lens,
                planned.max_seq_len,
                out=shaped,
                mask=mask,
                **named,
            )
        except (InvalidInput, Unsupported) as error:
            raise under_names(error, OUR_NAMES) from None
        return (out, result[1]) if isinstance(result, tuple) else out

    def _keep(self, given: dict[str, Tensor], pages: list[int]) -> dict[str, Any]:
        """The step's tensors: in the caller's buffers and one table with CUDA graphs, else new."""
        batch = len(pages)
        kept = []
        for name, value in given.items():
            buffer = self._buffers[name]
            own = value.to(self.device, torch.int32, non_blocking=True)
            if self._use_cuda_graph and buffer is not None:
                own = write(buffer[: len(own)], own)
            elif own is value and name in ("qo_indptr", "kv_len_arr"):
                # `run` reads these two: what the caller writes there later is of another step
                own = value.clone(memory_format=torch.contiguous_format)
            kept.append(own)
        cum_q, starts, indices, lengths = kept
        table = block_table(starts, indices, max(1, *pages))
        if self._use_cuda_graph:
            old = self._planned
            shape = (batch, self._columns(batch))
            whole = table.new_zeros(shape) if old is None else old.block_tables
            write(whole[:, : table.shape[1]], table[:, : whole.shape[1]])
            table = whole
        return {"block_tables": table, "seq_lens": lengths, "cum_seq_lens_q": cum_q}

    def _columns(self, batch: int) -> int:
        """Of the block table of all plans with CUDA graphs."""
        indices = self._buffers["kv_indices"]
        if self._pages_per_request is not None or indices is None:
            return self._pages_per_request or 1
        return max(1, -(-len(indices) // batch))

    def _check_graph(
        self, numbers: dict[str, Any], q_lens: list[int], pages: list[int], indices: int
    ) -> None:
        """What a captured call can not change: numbers, batch size, form of query lengths,
        capacity.
        """
        batch, old = len(pages), self._planned
        if old is not None:
            check_same(old, numbers)
        sizes = {"qo_indptr": batch + 1, "kv_indptr": batch + 1, "kv_len_arr": batch}
        for name, size in sizes.items():
            buffer = self._buffers[name]
            if buffer is None or len(buffer) != size:
                got = f"{size} entries for a buffer of {0 if buffer is None else len(buffer)}"
                raise invalid(name, got, "the batch size of the buffers, with CUDA graphs")
        room = self._buffers["kv_indices"]
        if room is None or indices > len(room):
            raise invalid(
                "kv_indices", f"{indices} pages", f"up to {0 if room is None else len(room)}"
            )
        if max(pages) > self._columns(batch):
            supported = f"up to {self._columns(batch)} a request, see pages_per_request"
            raise invalid("kv_indptr", f"{max(pages)} pages of a request", supported)
        if old is None:
            return
        if sum(q_lens) != old.total_q:
            raise invalid("qo_indptr", f"{sum(q_lens)} query tokens", f"{old.total_q}, as captured")
        if old.q_len and set(q_lens) != {old.q_len}:
            supported = f"{old.q_len} query tokens for each request, as in the first plan"
            raise invalid("qo_indptr", f"lengths {sorted(set(q_lens))}", supported)
        if max(q_lens) > old.max_q_len:
            raise invalid("qo_indptr", f"{max(q_lens)} query tokens", f"up to {old.max_q_len}")
