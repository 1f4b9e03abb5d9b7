"""Tests that need an NVIDIA GPU; without one they are skipped, and the reason is told."""

from __future__ import annotations

import pytest

from imgfmt.errors import Unsupported
from restore.cuda_driver import CudaDriver, cuda_driver


@pytest.fixture(scope="session")
def driver() -> CudaDriver:
    """The driver of this machine."""
    try:
        found = cuda_driver()
    except Unsupported as error:
        pytest.skip(str(error))
    if not found.device_count():
        pytest.skip("this machine shows no GPU")
    return found
