"""vLLM's entry point: `vllm serve MODEL --attention-backend MLA_LAB` after `mla-lab[vllm]`.

vLLM calls `register` in each of its processes; the backend's module is imported when it is chosen.
"""

from __future__ import annotations

NAME = "MLA_LAB"
PATH = "mla_lab.interop.engines.vllm_mla.MlaLabBackend"


def register() -> None:
    """Add the backend to vLLM's registry; a second call leaves it as it is."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, PATH)
