"""A Triton kernel that writes 16 TiB behind the end of its tensor."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def _write(out, distance):  # type: ignore[no-untyped-def]  # Triton would read types here as its own
    tl.store(out + distance, 1.0)


def write_far_away(out: Any) -> None:
    """Launch the kernel; CUDA tells of the illegal address when the device is waited for."""
    _write[(1,)](out, 1 << 42)
