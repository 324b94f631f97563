"""How many nodes and workers the user asked for (contract sections 1.4 and 1.6)."""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.base.errors import UserError


def parse_nnodes(text: str, source: str = "--nnodes") -> tuple[int, int]:
    """Read `N` or `MIN:MAX` as (minimum, maximum) of nodes.

    Args:
        text: what the user wrote.
        source: where it was written, for the message.

    Raises:
        UserError: it is neither, or no job can have such sizes.
    """
    try:
        numbers = [int(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        from rallypoint.base.user_errors import user_error

        neither = f"{source}={text!r} is neither a number of nodes nor a range of them; write 2 or 1:4"
        raise user_error(neither, RuntimeError)
    low, high = numbers[0], numbers[-1]
    if not 0 < low <= high:
        from rallypoint.base.user_errors import user_error

        bounds = f"{source}={text!r} asks for {low} to {high} nodes; the smallest is 1, the largest comes second"
        raise user_error(bounds, AssertionError)
    return low, high


def local_world_size(text: str, environ: Mapping[str, str], source: str = "--nproc-per-node") -> int:
    """Read a number of workers, or count the devices that one worker each shall have.

    Args:
        text: a number, `cpu`, `gpu`, `xpu` or `auto`.
        environ: where CUDA_VISIBLE_DEVICES and ZE_AFFINITY_MASK are looked up.
        source: where it was written, for the message.

    Raises:
        UserError: it is none of these, less than one, or the device is missing.
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
    if text == "auto":  # a GPU that is part of the processor is no reason to start one worker only
        return cuda_count(environ) or xpu_count(environ, integrated=False) or cpu_count()
    if text not in _DEVICE_VENDORS:
        raise UserError(f"{source}={text!r} is not a number, and only cpu, gpu, xpu and auto are counted; write one")
    maker, variable = _DEVICE_VENDORS[text]
    if count := (cuda_count if text == "gpu" else xpu_count)(environ):
        return count
    visible = f" with {variable}={environ[variable]!r}" if variable in environ else " on this machine"
    raise UserError(
        f"{source}={text} counts {maker} GPUs, and there is none that could be opened{visible}; "
        "write a number, cpu or auto"
    )


_DEVICE_VENDORS = {"gpu": ("NVIDIA", "CUDA_VISIBLE_DEVICES"), "xpu": ("Intel", "ZE_AFFINITY_MASK")}
"""Who makes what is counted, and which variable hides some of it."""
