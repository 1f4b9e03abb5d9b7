"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("snapcask", deadline=None)  # a busy machine is no failure
settings.load_profile("snapcask")
