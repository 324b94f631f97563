"""Real training with torch over three hosts, two of which are lost on the way."""

from __future__ import annotations

import re
import signal
from contextlib import closing
from pathlib import Path

import pytest

from tests import without_compiler
from tests.faults.cluster import Cluster
from tests.progress_pipe import ProgressPipe

pytestmark = pytest.mark.torch

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "train_ddp.py")
STEPS = 100
FATAL, FATAL_TOO = 30, 70
"""Steps at which somebody is lost."""
MODEL = [EXAMPLE, f"--steps={STEPS}", "--every=20"]


def final_loss(text: str) -> float:
    """The loss that the worker of rank 0 has printed at the end."""
    (found,) = re.findall(r"final loss (\d+\.\d{9})$", text, re.MULTILINE)
    return float(found)


@pytest.mark.timeout(200)
def test_survivors_resume_and_finish_with_the_same_loss(cluster: Cluster, tmp_path: Path, undisturbed: float) -> None:
    """One agent is killed, then one host is cut off: each time those that are left go on from the last checkpoint."""
    # A real host finds its own address by its name: these share the machine's name.
    env = {
        **without_compiler.ENVIRONMENT,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    command = ["--max-restarts=3", *MODEL, f"--checkpoint-dir={tmp_path / 'checkpoint'}"]
    cluster.nnodes = "1:3"
    with closing(ProgressPipe(tmp_path / "progress")) as told:
        a, b, c = agents = [cluster.run(name, [*command, f"--progress={told.path}"], env=env) for name in "ABC"]
        told.until("step", FATAL, f"step {FATAL}")
        c.job.signal(signal.SIGKILL)
        assert c.job.ends() == -signal.SIGKILL
        told.until("training", 20, "two workers have resumed from a checkpoint", times=2)
        told.until("step", FATAL_TOO, f"step {FATAL_TOO}")
        b.host.cut_off()
        told.until("training", FATAL, "one worker has resumed from a later checkpoint")
        told.release()
        assert a.job.ends() == 0, a.job.err
    b.job.stop()
    found = final_loss("\n".join(line for agent in agents for line in agent.job.out))
    assert found == pytest.approx(undisturbed, abs=1e-6)
