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
        raise UserError(f"{source}={text!r} is neither a number of nodes nor a range of them; write 2 or 1:4")
    low, high = numbers[0], numbers[-1]
    if not 0 < low <= high:
        raise UserError(
            f"{source}={text!r} asks for {low} to {high} nodes; the smallest is 1, the largest comes second"
        )
    return low, high


def local_world_size(text: str, environ: Mapping[str, str], source: str = "--nproc-per-node") -> int:
    """Read a number of workers, or count the devices that one worker each shall have.

    Args:
        text: a number, `cpu`, `gpu` or `auto`.
        environ: where CUDA_VISIBLE_DEVICES is looked up.
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
    from rallypoint.base.devices import cpu_count, cuda_count

    if text == "cpu":
        return cpu_count()
    if text == "auto":
        return cuda_count(environ) or cpu_count()
    if text == "gpu":
        if count := cuda_count(environ):
            return count
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        why = "no NVIDIA GPU on this machine" if visible is None else f"none with CUDA_VISIBLE_DEVICES={visible!r}"
        raise UserError(f"{source}=gpu counts GPUs, and there is {why}; write a number, cpu or auto")
    raise UserError(f"{source}={text!r} is not a number, and only cpu, gpu and auto are counted; write the number")
