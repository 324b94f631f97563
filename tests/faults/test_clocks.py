"""A host whose wall clock is off by an hour."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.faults.cluster import SAFE_LEASE, Cluster, stays
from tests.jobs.nodes import common

OFF = 3600
SHIM = f"""
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *found) {{
    int result = syscall(SYS_clock_gettime, clock, found);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) found->tv_sec += {OFF};
    return result;
}}
int gettimeofday(struct timeval *found, void *zone) {{
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return 0;
}}
time_t time(time_t *found) {{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found) *found = now.tv_sec;
    return now.tv_sec;
}}
"""


@pytest.fixture
def shifted(tmp_path: Path) -> dict[str, str]:
    """Variables under which a process reads a wall clock that is an hour ahead, in whatever language it asks."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("FAULT TEST DID NOT RUN: needs a C compiler, to put the clock of a host wrong")
    source, library = tmp_path / "clock.c", tmp_path / "clock.so"
    source.write_text(SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    return {"LD_PRELOAD": str(library)}


@pytest.mark.parametrize("wrong", [0, 2], ids=["the control plane's host", "another host"])
def test_nobody_minds(cluster: Cluster, shifted: dict[str, str], wrong: int) -> None:
    agents = [
        cluster.start(name, "--max-restarts=1", env=shifted if number == wrong else {})
        for number, name in enumerate("ABC")
    ]
    cluster.all_up(agents)
    ahead = [float(agent.ups[-1]["clock"]) - time.time() for agent in agents]
    assert [round(each / OFF) for each in ahead] == [int(number == wrong) for number in range(3)]
    stays(agents, SAFE_LEASE)
    cluster.say("fail-B-0")
    cluster.all_up(agents, starts=2)
    assert common(agents, [1, 1, 1], "TORCHELASTIC_RESTART_COUNT") == "1"
    cluster.finish(agents)
    assert [len(agent.ups) for agent in agents] == [2, 2, 2]
