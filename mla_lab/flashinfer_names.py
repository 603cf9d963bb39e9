"""The module `mla_lab.interop.flashinfer` by the name that programs import."""

import sys

from .interop import flashinfer
from .interop.flashinfer import *  # noqa: F403

sys.modules[__name__] = flashinfer
