"""Loading tensors for programs that block; apart from `snapcask.api`, as most verbs load none."""

from __future__ import annotations

from snapcask import loading
from snapcask.running import blocking

load = blocking(loading.load)
load_replicas = blocking(loading.load_replicas)
load_ranges = blocking(loading.load_ranges)
