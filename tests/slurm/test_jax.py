"""Real jax under a real Slurm: the task that Slurm tells of is the agent's, and each worker finds itself anyway."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys

import pytest

from tests.slurm.jobs import SlurmJobs

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed (pip install jax)"),
]

WORKER = """
import os, jax
jax.distributed.initialize()
mine = jax.numpy.ones(jax.local_device_count())
total = int(jax.pmap(lambda each: jax.lax.psum(each, "all"), "all")(mine)[0])
os.write(1, f"process {jax.process_index()} of {jax.process_count()}, sum {total}\\n".encode())
"""


def test_bare_initialize_in_a_step_of_two_nodes(jobs: SlurmJobs) -> None:
    (jobs.folder / "jax_worker.py").write_text(WORKER)
    words = [sys.executable, "-m", "rallypoint.run", "--cluster=auto", "--nproc-per-node=2", "--worker-env=jax"]
    command = shlex.join([*words, "jax_worker.py"])
    env = {**jobs.env, "JAX_PLATFORMS": "cpu"}
    out = jobs.cluster("srun", "-N2", "--ntasks-per-node=1", f"--chdir={jobs.folder}", "sh", "-c", command, env=env)
    found = re.findall(r"process \d of \d, sum \d", out)  # gloo writes to the same lines
    assert sorted(found) == [f"process {rank} of 4, sum 4" for rank in range(4)]
