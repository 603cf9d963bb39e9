"""Our call in other projects' programs.

flashinfer  FlashInfer's names; programs import them as `mla_lab.flashinfer_names`
flash_mla   FlashMLA's decode names; programs import them as `mla_lab.flash_mla_names`
engines     attention backends of vLLM and SGLang
capture     a program's calls, written down in FlashInfer-Bench's schema
"""
