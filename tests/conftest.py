"""Settings that every test shares."""

from __future__ import annotations

import os

from hypothesis import settings

# CI must not depend on luck or on how busy the machine is; HYPOTHESIS_PROFILE=explore searches
settings.register_profile("house", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "house"))
