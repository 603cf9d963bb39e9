"""The module `mla_lab.names.flash_mla` by the name that programs import."""

import sys

from .names import flash_mla
from .names.flash_mla import *  # noqa: F403

sys.modules[__name__] = flash_mla
