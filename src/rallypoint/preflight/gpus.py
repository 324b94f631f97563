"""NVIDIA GPUs: whether all answer, their memory, and what the kernel's log says of them. A driver may hang."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from rallypoint.base.devices import cuda_count
from rallypoint.base.kernel_log import PATH, LogEntry, log_entries, raw_entries
from rallypoint.base.nvml import LIBRARY, NvmlHealth, nvml_health
from rallypoint.preflight.results import Judgement, failed, not_known, passed, warned
from rallypoint.preflight.table import Check, CheckInputs, Reading

XID_HOURS = 24
PROGRAM_XIDS = frozenset({13, 31, 32, 43, 45, 68, 69})
"""Those that a program's own mistakes cause (NVIDIA's catalogue of Xid errors); others may be the GPU's."""

_XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)")


class GpuFacts(NamedTuple):
    """What NVML says, None where there is no such library; `listed` GPUs have the kernel's driver and a device file,
    of which programs may use `visible`; this node will run `workers`, 0 if that is not known."""

    nvml: NvmlHealth | None
    listed: int = 0
    visible: int = 0
    workers: int = 0


def read_gpus(inputs: CheckInputs) -> GpuFacts:
    """Ask the driver."""
    listed = cuda_count({})
    if not listed and not os.path.exists("/proc/driver/nvidia/version"):
        return GpuFacts(None)
    return GpuFacts(nvml_health(), listed, cuda_count(os.environ), inputs.workers)


def judge_gpus(facts: GpuFacts) -> Judgement:
    """Whether the driver answers for all of them."""
    if facts.nvml is None:
        if not facts.listed:
            return not_known("there is no NVIDIA driver")
        return warned(
            f"{LIBRARY} is not there, so nothing is known of {facts.listed} GPUs",
            "install it with the driver; in a container, set NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
    see = "see `nvidia-smi` and the kernel's log; reset the GPU or restart the machine"
    if facts.nvml.trouble:
        return failed(f"the NVIDIA driver does not work: {facts.nvml.trouble}", see)
    gpus = facts.nvml.gpus
    lost = [f"{each.address} ({each.trouble})" for each in gpus if each.trouble]
    if lost:
        return failed(f"{len(lost)} of {len(gpus)} GPUs do not answer: {', '.join(lost)}", see)
    if len(gpus) < facts.listed:
        return failed(f"the kernel lists {facts.listed} GPUs, and the driver knows {len(gpus)}", see)
    kinds = Counter(each.name for each in gpus)
    text = f"{', '.join(f'{count} {name}' for name, count in kinds.items()) or 'none'}, driver {facts.nvml.driver}"
    if facts.workers > facts.visible > 0:
        return warned(f"{text}: {facts.workers} workers share {facts.visible}", "give --nproc-per-node=gpu")
    return passed(text)


def judge_gpu_memory(facts: GpuFacts) -> Judgement:
    """Errors that ECC could not correct, and rows that are to be replaced."""
    known = [] if facts.nvml is None else [each for each in facts.nvml.gpus if not each.trouble]
    if not known:
        return not_known("there is no GPU")
    worn = [each.address for each in known if each.remap_failed]
    if worn:
        return failed(f"rows of memory could not be replaced on {', '.join(worn)}", "have the GPU replaced")
    reset = "reset the GPU (`nvidia-smi -r`) or restart the machine"
    broken = [f"{each.errors} on {each.address}" for each in known if each.errors > 0]
    if broken:
        return failed(f"memory errors that ECC could not correct: {', '.join(broken)}", reset)
    pending = [each.address for each in known if each.remap_pending]
    if pending:
        return warned(f"memory is to be replaced at the next reset of {', '.join(pending)}", reset)
    if all(each.errors < 0 for each in known):
        return not_known("ECC is off, or not there")
    return passed(f"no errors on {len(known)} GPUs since the driver was loaded")


class XidFacts(NamedTuple):
    """Errors that the NVIDIA driver has logged: how many seconds ago, at which address, of which number; or why the
    kernel's log may not be read."""

    errors: tuple[tuple[float, str, int], ...] = ()
    trouble: str = ""


def read_kernel_log(_inputs: CheckInputs) -> XidFacts:
    """Read the kernel's log."""
    try:
        return xid_facts(log_entries(raw_entries()), time.monotonic())
    except OSError as error:
        return XidFacts(trouble=f"{PATH} cannot be read ({error.strerror})")


def xid_facts(entries: Iterable[LogEntry], now: float) -> XidFacts:
    """The errors among entries of the log; `now` is on the same clock."""
    found = ((now - each.moment, _XID.search(each.text)) for each in entries)
    return XidFacts(tuple((ago, match[1], int(match[2])) for ago, match in found if match))


def judge_xid(facts: XidFacts) -> Judgement:
    """Errors of the last hours that a program's own mistakes do not cause."""
    if facts.trouble:
        return not_known(facts.trouble)
    recent = [each for each in facts.errors if each[0] < XID_HOURS * 3600 and each[2] not in PROGRAM_XIDS]
    if not recent:
        return passed(f"none in the last {XID_HOURS} hours but what programs cause")
    ago, address, number = recent[-1]
    return warned(
        f"{len(recent)} in the last {XID_HOURS} hours, the last {ago / 3600:.1f} hours ago: Xid {number} of {address}",
        "look the number up in NVIDIA's catalogue of Xid errors; see `dmesg | grep Xid`",
    )


GPUS = (
    Reading(
        read_gpus,
        (
            Check(
                "gpus",
                "Whether NVIDIA's driver answers for each GPU (NVML), and knows all GPUs that the kernel lists; with "
                "`--preflight`, whether each worker can have a GPU of its own.",
                "there is no NVML, it does not answer in time, or workers share GPUs",
                "NVML does not work, a GPU does not answer, or one is missing",
                "`nvidia-smi`, a reset, a restart; in a container `NVIDIA_DRIVER_CAPABILITIES=compute,utility`",
                judge_gpus,
            ),
            Check(
                "gpu-memory",
                "Memory errors that ECC could not correct since the driver was loaded, and rows of memory that will "
                "be replaced by spare ones.",
                "a replacement waits for a reset",
                "uncorrected errors, or a replacement that has failed",
                "`nvidia-smi -r`; a GPU whose rows cannot be replaced must itself be replaced",
                judge_gpu_memory,
            ),
        ),
        warned(
            "the NVIDIA driver does not answer", "see `nvidia-smi`; switch persistence mode on (`nvidia-smi -pm 1`)"
        ),
        may_hang=True,
    ),
    Reading(
        read_kernel_log,
        (
            Check(
                "xid",
                f"GPU errors (Xid) in the kernel's log of the last {XID_HOURS} hours, if it may be read. Errors that "
                f"programs cause do not count: {', '.join(map(str, sorted(PROGRAM_XIDS)))}.",
                "there are any",
                "",
                "NVIDIA's catalogue of Xid errors says what each means",
                judge_xid,
            ),
        ),
        not_known("the kernel's log could not be read in time"),
    ),
)
