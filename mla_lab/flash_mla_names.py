"""The module `mla_lab.interop.flash_mla` by the name that programs import."""

import sys

from .interop import flash_mla
from .interop.flash_mla import *  # noqa: F403

sys.modules[__name__] = flash_mla
