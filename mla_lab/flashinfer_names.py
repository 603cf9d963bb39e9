"""The module `mla_lab.names.flashinfer` by the name that programs import."""

import sys

from .names import flashinfer
from .names.flashinfer import *  # noqa: F403

sys.modules[__name__] = flashinfer
