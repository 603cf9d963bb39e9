"""Sizes of a cached token. Latent 512 and rope 64 are DeepSeek's absorbed form: a token is one row
of 576 values, all of them keys, the first 512 also values (DeepSeek-V2, arXiv:2405.04434, section
2.1).
"""

LATENT_DIM = 512
ROPE_DIM = 64

#: of the format "fp8_656": 512 e4m3, 4 fp32 scales, 64 bf16 rope
FP8_656_BYTES = 656
