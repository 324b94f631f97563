"""How many processors and GPUs this process may use, asked of the kernel and the driver alone.

Nothing here loads a GPU library: the driver's files under /proc and /dev say which GPUs there are, and
CUDA_VISIBLE_DEVICES says which of them a CUDA program would see. Its rules are those of the CUDA C++ Programming
Guide, section "CUDA Environment Variables".
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

_INFORMATION = re.compile(r"^([^:\n]+?)[ \t]*:[ \t]*(.*?)[ \t]*$", re.MULTILINE)


def cpu_count() -> int:
    """Processors that this process may run on: a cpuset or an affinity mask counts, as it does for torch."""
    return len(os.sched_getaffinity(0))


def cuda_count(environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """GPUs that a CUDA program started with `environ` would see; 0 without an NVIDIA driver.

    Args:
        environ: where CUDA_VISIBLE_DEVICES is looked up.
        root: the folder that holds `proc` and `dev`.
    """
    uuids = _gpus(root)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return len(uuids) if visible is None else _count_visible(visible, uuids)


def _gpus(root: Path) -> list[str]:
    """One entry for each GPU that this process could open: its UUID, or an empty text where the driver tells none."""
    folders = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    found = [dict(_INFORMATION.findall(file.read_text(errors="replace"))) for file in folders]
    nodes = {path.name for path in (root / "dev").glob("nvidia[0-9]*")}
    if not found:
        # Sandboxes often hide the driver's /proc but must show the device nodes.
        return [""] * len(nodes)
    # A container may see the whole machine's /proc and still have the nodes of a few GPUs only.
    opened = [gpu for gpu in found if not nodes or _node(gpu) in nodes]
    return [gpu.get("GPU UUID", "") for gpu in opened]


def _node(gpu: Mapping[str, str]) -> str:
    return f"nvidia{gpu.get('Device Minor', '')}"


def _count_visible(visible: str, uuids: list[str]) -> int:
    """CUDA reads the list up to the first entry that names no GPU; a GPU named twice makes the whole list void."""
    entries = [entry.strip() for entry in visible.split(",")]
    if entries[0].startswith("MIG-"):
        return min(1, len(uuids))  # a CUDA program sees one MIG instance, however many are named
    chosen: list[int] = []
    for entry in entries:
        gpu = _index(entry, uuids)
        if gpu is None:
            break
        if gpu in chosen:
            return 0
        chosen.append(gpu)
    return len(chosen)


def _index(entry: str, uuids: list[str]) -> int | None:
    """The GPU that `entry` names: by number, or by a UUID or the beginning of one that fits one GPU only."""
    if entry.startswith("GPU-"):
        matches = [number for number, uuid in enumerate(uuids) if uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else None
    if entry.isascii() and entry.isdigit() and int(entry) < len(uuids):
        return int(entry)
    return None
