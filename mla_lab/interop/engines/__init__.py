"""Serving engines: our decode call behind their attention backends.

step          the decode part of a step, from an engine's metadata to the call
sglang_plugin what SGLang loads at start (`sglang.srt.plugins`): registers the backend mla_lab
sglang_mla    that backend: decode and draft verification, beside another backend's prefill
vllm_plugin   what vLLM loads at start (`vllm.general_plugins`): registers the backend MLA_LAB
vllm_mla      that backend: its metadata builder and its layer, for compute capability 9.0
"""
