"""Numbers of nodes and workers (contract sections 1.4 and 1.6)."""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.base.errors import UserError, user_error


def parse_nnodes(text: str, source: str = "--nnodes") -> tuple[int, int]:
    """Read `N` or `MIN:MAX` as (minimum, maximum) of nodes; `source` is where it was given, for messages.

    Raises:
        UserError: it is neither, or no job can have such sizes.
    """
    try:
        numbers = [int(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise user_error(f"{source}={text!r} is not a number or a range of nodes; write 2 or 1:4", RuntimeError)
    low, high = numbers[0], numbers[-1]
    if not 0 < low <= high:
        bounds = f"{source}={text!r} asks for {low} to {high} nodes; the smallest is 1, the largest comes second"
        raise user_error(bounds, AssertionError)
    return low, high


def local_world_size(text: str, environ: Mapping[str, str], source: str = "--nproc-per-node") -> int:
    """Read a number of workers, or count the devices of `cpu`, `gpu`, `xpu` or `auto`.

    Args:
        text: what the user wrote.
        environ: where CUDA_VISIBLE_DEVICES and ZE_AFFINITY_MASK are looked up.
        source: where it was given, for messages.

    Raises:
        UserError: it is none of these, less than one, or there is no such device.
    """
    try:
        size = int(text)
    except ValueError:
        size = _count_devices(text, environ, source)
    if size < 1:
        raise UserError(f"{source}={text!r} asks for {size} workers; the smallest number is 1")
    return size


def _count_devices(text: str, environ: Mapping[str, str], source: str) -> int:
    from rallypoint.base.devices import cpu_count, cuda_count, xpu_count

    if text == "cpu":
        return cpu_count()
    if text == "auto":  # an integrated GPU is no reason to start only one worker
        return cuda_count(environ) or xpu_count(environ, integrated=False) or cpu_count()
    if text not in _DEVICE_VENDORS:
        raise UserError(f"{source}={text!r} is not a number of workers; write one, or cpu, gpu, xpu or auto")
    vendor, variable = _DEVICE_VENDORS[text]
    if count := (cuda_count if text == "gpu" else xpu_count)(environ):
        return count
    visible = f" with {variable}={environ[variable]!r}" if variable in environ else " on this machine"
    raise UserError(
        f"{source}={text} counts {vendor} GPUs, and there is none that could be opened{visible}; "
        "write a number, cpu or auto"
    )


_DEVICE_VENDORS = {"gpu": ("NVIDIA", "CUDA_VISIBLE_DEVICES"), "xpu": ("Intel", "ZE_AFFINITY_MASK")}
"""The vendor of the counted devices, and the variable that hides some of them."""
