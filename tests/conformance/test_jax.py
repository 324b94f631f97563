"""Real jax under `--worker-env=jax`: bare `initialize()` over two nodes, before and after a kill; the example."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.launching import Job, Launcher
from tests.ports import free_port

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed (pip install jax)"),
]

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "frameworks" / "jax" / "train.py")
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}

TASK = {"SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "node[0-1]", "SLURM_STEP_NUM_NODES": "2", "SLURM_NTASKS": "2"}
"""What srun tells the one task of a node, beside its own number."""

WORKER = """
import json, os, signal, time
import jax
jax.distributed.initialize()
import jax.numpy as jnp

def psum(value):
    values = jnp.full(jax.local_device_count(), value)
    return float(jax.pmap(lambda each: jax.lax.psum(each, "all"), "all")(values)[0])

found = {"index": jax.process_index(), "count": jax.process_count(), "sum": psum(10.0 ** jax.process_index())}
os.write(1, json.dumps({**found, **os.environ}).encode() + b"\\n")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    psum(1.0)  # all have written
    if jax.process_index() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
"""


def found_in(jobs: list[Job], restart: int) -> list[dict[str, Any]]:
    """What the workers of a round have found, by rank."""
    lines = [json.loads(line) for job in jobs for line in job.out if line.startswith("{")]
    of_round = [each for each in lines if each["TORCHELASTIC_RESTART_COUNT"] == str(restart)]
    return sorted(of_round, key=lambda each: int(each["RANK"]))


def test_two_nodes_under_slurm_before_and_after_a_kill(launcher: Launcher) -> None:
    script = launcher.script(WORKER)
    flags = (
        *("--nnodes=2", "--nproc-per-node=2", "--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-id=job"),
        *(f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-conf=failure_grace=0.5", "--worker-env=jax,tf,ompi"),
    )
    jobs = [
        launcher(*flags, *more, script, env={**ENVIRONMENT, **TASK, "SLURM_PROCID": str(node), "SLURM_LOCALID": "0"})
        for node, more in enumerate([(), ("--preload=json",)])
    ]
    for job in jobs:
        assert job.ends() == 0, job.err
        assert "without preloading" not in job.err
    for restart in range(2):
        found = found_in(jobs, restart)
        assert [each["index"] for each in found] == [0, 1, 2, 3]
        assert {(each["count"], each["sum"]) for each in found} == {(4, 1111.0)}
        for name in ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JAX_PROCESS_ID"):
            assert [each[name] for each in found] == ["0", "1", "2", "3"], name
        assert [each["SLURM_LOCALID"] for each in found] == ["0", "1", "0", "1"]
        assert {each["SLURM_NTASKS"] for each in found} == {"4"}
        configs = [json.loads(each["TF_CONFIG"]) for each in found]
        assert [each["task"]["index"] for each in configs] == [0, 1, 2, 3]
        (workers,) = {tuple(each["cluster"]["worker"]) for each in configs}
        assert len({*workers}) == 4
    first, second = ({each["JAX_COORDINATOR_ADDRESS"] for each in found_in(jobs, restart)} for restart in range(2))
    assert len(first) == len(second) == 1
    assert first != second


def test_the_example_in_a_pod_where_jax_would_look_for_an_indexed_job_by_the_api_of_kubernetes(
    launcher: Launcher,
) -> None:
    """Killed and resumed, it is in tests/frameworks."""
    pod = {**ENVIRONMENT, "KUBERNETES_SERVICE_HOST": "192.0.2.1"}
    flags = ("--standalone", "--nproc-per-node=2", "--worker-env=jax")
    job = launcher(*flags, EXAMPLE, "--steps=2", f"--checkpoint-dir={launcher.folder}", env=pod)
    assert job.ends() == 0, job.err
    assert "2 workers, from step 0" in job.out
    assert "Kubernetes environment detected" not in job.err
    assert (launcher.folder / "last.npz").exists()
