"""Real training by torch over three hosts, of which two are lost on the way."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests import without_compiler
from tests.faults.cluster import Cluster, settle

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


def reached(progress: Path, event: str, step: int, times: int = 1) -> bool:
    """Whether the workers have told of an event at that step or later, so many times."""
    lines = progress.read_text().splitlines() if progress.exists() else []
    told = [json.loads(line) for line in lines]
    return len([each for each in told if each["event"] == event and each["step"] >= step]) >= times


@pytest.mark.timeout(200)
def test_survivors_resume_and_finish_with_the_same_loss(cluster: Cluster, tmp_path: Path, undisturbed: float) -> None:
    """One agent is killed, then one host is cut off: each time those that are left go on from the last checkpoint."""
    # A real host finds its own address by its name: these share the machine's name.
    env = {
        **without_compiler.ENVIRONMENT,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    progress = tmp_path / "progress"
    command = ["--max-restarts=3", *MODEL, f"--checkpoint-dir={tmp_path / 'checkpoint'}", f"--progress={progress}"]
    cluster.nnodes = "1:3"
    a, b, c = agents = [cluster.run(name, command, env=env) for name in "ABC"]
    settle(lambda: reached(progress, "step", FATAL), f"step {FATAL}")
    c.job.signal(signal.SIGKILL)
    assert c.job.ends() == -signal.SIGKILL
    settle(lambda: reached(progress, "training", 20, times=2), "two workers have resumed from a checkpoint")
    settle(lambda: reached(progress, "step", FATAL_TOO), f"step {FATAL_TOO}")
    b.host.cut_off()
    settle(lambda: reached(progress, "training", FATAL, times=1), "one worker has resumed from a later checkpoint")
    assert a.job.ends() == 0, a.job.err
    b.job.stop()
    found = final_loss("\n".join(line for agent in agents for line in agent.job.out))
    assert found == pytest.approx(undisturbed, abs=1e-6)
