"""`python -m mla_lab` is `mla-lab`."""

import sys

from .cli import main

sys.exit(main())
