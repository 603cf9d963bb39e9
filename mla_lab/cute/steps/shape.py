"""Sizes of all steps."""

from __future__ import annotations

#: query rows of a CTA, and tokens of a page and of a tile
ROWS = TILE = 64
#: numbers of a token: the latent, which is the value as well, and the rope
LATENT, ROPE = 128, 64
WIDTH = LATENT + ROPE
#: a column box of a tile: 64 numbers, the 128 bytes of a swizzle
BOX = 64
BOXES = WIDTH // BOX
WARP_GROUP = 128
