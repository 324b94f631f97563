"""A restart and the GPU memory of the dead worker: a real agent, and a stand-in for NVIDIA's library."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.jobs.launching import AtOnce, Job, Launcher
from tests.nvml import StandIn, needs_compiler
from tests.waiting import until

pytestmark = needs_compiler

GIB = 1 << 30
IN_USE = f"{80 * GIB} {62 * GIB}"
"""A GPU's memory, and that in use; processes follow."""
STARTED = (
    "starting the workers even though GPU memory was still in use after 0.5 s (--gpu-memory-timeout): GPU 0: 61 GiB "
    "held by"
)

_ON_A_NODE_WITH_A_GPU = """
import sys
from rallypoint.features import table
from rallypoint.base import gpu_holders
table.NVIDIA_DEVICES = ("/dev/null",)
gpu_holders.pids_are_ours = lambda: True  # the pids of the stand-in are those of this namespace, also in a container
from rallypoint.cli.rallyrun import main
sys.exit(main())
"""

_WORKER = """
import os, signal, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    with open("new", "w") as file:
        file.write(sys.argv[1].replace("PID", str(os.getpid())) + "\\n")
    os.replace("new", "gpus")
    os.kill(os.getpid(), signal.SIGKILL)
print("restarted", flush=True)
"""


def launched(rallyrun: Launcher, gpu: str, *flags: str) -> tuple[StandIn, Job]:
    """A job whose worker dies, after which NVML lists this; `PID` in it stands for the worker's."""
    nvml = StandIn(rallyrun.folder)
    path = os.pathsep.join(filter(None, [str(rallyrun.folder), os.environ.get("LD_LIBRARY_PATH", "")]))
    env = {"LD_LIBRARY_PATH": path, "LOGLEVEL": "INFO"}
    script = rallyrun.script(_WORKER)
    command = [sys.executable, "-c", _ON_A_NODE_WITH_A_GPU, "--standalone", "--max-restarts=1", *flags, script, gpu]
    return nvml, rallyrun.command(command, env)


def test_a_restart_and_the_memory_of_the_dead_worker(at_once: AtOnce) -> None:
    def waits_until_it_is_free(rallyrun: Launcher) -> None:
        nvml, job = launched(rallyrun, f"{IN_USE} PID:{61 * GIB}", "--gpu-memory-timeout=100")
        until(lambda: nvml.asked() > 7, "several looks")
        assert job.out == [], "the worker does not start while the driver lists the one that has died"
        nvml.answer(IN_USE)
        assert job.ends() == 0, job.err
        assert job.out == ["restarted"]
        assert "s for the memory of GPU 0" in job.err
        assert "held by" not in job.err

    def starts_at_the_limit(rallyrun: Launcher) -> None:
        _, job = launched(rallyrun, f"{IN_USE} PID:{61 * GIB}", "--gpu-memory-timeout=0.5")
        assert job.ends() == 0, job.err
        assert job.out == ["restarted"]
        assert STARTED in job.err
        assert "which has ended" in job.err

    def does_not_look(rallyrun: Launcher) -> None:
        nvml, job = launched(rallyrun, f"{IN_USE} PID:{61 * GIB}", "--gpu-memory-timeout=0")
        assert job.ends() == 0, job.err
        assert nvml.asked() == 0
        assert "GPU" not in job.err

    def names_a_stranger(rallyrun: Launcher) -> None:
        nvml, job = launched(rallyrun, f"{IN_USE} {os.getpid()}:{61 * GIB}", "--gpu-memory-timeout=100")
        assert job.ends() == 0, job.err
        (line,) = [line for line in job.err.split("\n") if "held by" in line]
        name = Path("/proc/self/comm").read_text().strip()
        assert f"GPU 0: 61 GiB held by pid {os.getpid()} ({name}, user " in line
        assert line.endswith(", which is not part of this job")
        assert nvml.asked() > 0

    def survives_a_driver_that_hangs(rallyrun: Launcher) -> None:
        _, job = launched(rallyrun, "hang", "--gpu-memory-timeout=0.5")
        assert job.ends() == 0, job.err
        assert job.out == ["restarted"]
        assert "NVIDIA's driver did not answer within 0.5 s" in job.err

    at_once(
        waits_until_it_is_free,
        starts_at_the_limit,
        does_not_look,
        names_a_stranger,
        survives_a_driver_that_hangs,
    )
