"""Jobs on a machine whose /etc/hosts is as Debian leaves it: `::1 localhost` besides `127.0.0.1 localhost`."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.jobs.launching import RALLYRUN, Job, Launcher
from tests.ports import free_port

BOUND = 'mount --bind "$0" /etc/hosts && exec "$@"'
HOSTS = "::1 localhost ip6-localhost ip6-loopback\n127.0.0.1 localhost\n"
SCRIPT = "import os; os.write(1, os.environ['MASTER_ADDR'].encode() + b'\\n')"


@pytest.fixture(autouse=True)
def own_mounts() -> None:
    tried = subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True, text=True)
    if shutil.which("unshare") is None or tried.returncode:
        pytest.skip(f"the kernel or container does not allow mounts of one's own (unshare -m): {tried.stderr.strip()}")


def start(rallyrun: Launcher, *flags: str) -> Job:
    hosts = rallyrun.folder / "hosts"
    hosts.write_text(HOSTS)
    command = ["unshare", "-m", "sh", "-c", BOUND, str(hosts), *RALLYRUN, *flags, rallyrun.script(SCRIPT)]
    return rallyrun.command(command)


def addresses(*jobs: Job) -> set[str]:
    codes = [job.ends() for job in jobs]
    assert codes == [0] * len(jobs), [job.err for job in jobs]
    return {line for job in jobs for line in job.out}


def test_a_job_of_this_machine_alone(rallyrun: Launcher) -> None:
    assert addresses(start(rallyrun, "--standalone"), start(rallyrun)) == {"127.0.0.1"}


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
def test_two_agents_that_meet_on_this_machine(rallyrun: Launcher, host: str) -> None:
    """Either may be group rank 0: the one that hosts the control plane, and the one that connects to it."""
    flags = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=job", f"--rdzv-endpoint={host}:{free_port()}"]
    first = start(rallyrun, *flags, "--node-rank=1")
    second = start(rallyrun, *flags, "--node-rank=0")
    assert addresses(first, second) == {"127.0.0.1"}
