"""SGLang's entry point: `--decode-attention-backend mla_lab`, with another backend for prefill.

SGLang calls `register` in each of its processes (`sglang.srt.plugins`); the backend's module is
imported when it is chosen.
"""

from __future__ import annotations

from typing import Any

NAME = "mla_lab"


def register() -> None:
    """Add the backend to SGLang's choices and registry; a second call leaves them as they are."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if NAME not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(create)


def create(runner: Any) -> Any:
    """The backend of a model runner; raises Unsupported for a model that is not MLA."""
    from .sglang_mla import MlaLabBackend

    return MlaLabBackend(runner)
