"""The Job of `deploy/kubernetes/job` in pods of namespaces: what it survives, and what is told of its end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.base.secrets import new_secret
from tests.deploy.manifests import SAMPLES, Manifest, of_kind, rendered, the_job
from tests.deploy.pods import Kubelet, Pod
from tests.faults import network
from tests.jobs.launching import Launcher

pytestmark = pytest.mark.root

TRAINER = """
import json, os, sys, time
from pathlib import Path
rank, world, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1])
saved = folder / "step"
first = int(saved.read_text()) if saved.exists() else 0
def say(what):
    os.write(1, f"{what}\\n".encode())
say(f"rank {rank} of {world} from {'the start' if first == 0 else 'a checkpoint'}")
while not (folder / "save").exists():
    time.sleep(0.02)
if rank == 0:
    (folder / "step.new").write_text("7")
    os.replace(folder / "step.new", saved)
    say("saved")
while not (folder / "finish").exists():
    if (folder / "fail").exists() and rank == 3:
        raise ValueError("boom")
    time.sleep(0.02)
"""

PROGRAM = ["train.py", "/checkpoints"]


@pytest.fixture
def kubelet(rallyrun: Launcher) -> Iterator[Kubelet]:
    if (reason := network.why_not()) is not None:
        pytest.skip(f"POD TESTS DID NOT RUN: {reason}")
    rallyrun.script(TRAINER, "train.py")
    with network.network() as net:
        made = Kubelet(net, rallyrun, {"secret": new_secret(), "http-token": new_secret()})
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def checkpoints(rallyrun: Launcher) -> Path:
    return rallyrun.folder / "volumes" / "checkpoints"


def start(kubelet: Kubelet, index: int, job: Manifest, name: str = "train", **given: str) -> Pod:
    """The pod of a Job with this index."""
    host = f"{name}-{index}"
    names = f"{host}.train.default.svc.cluster.local {host}.train {host}"
    return kubelet.start(job, names, {"JOB_COMPLETION_INDEX": str(index), **given}, PROGRAM)


def test_a_job_survives_the_loss_of_each_of_its_pods(kubelet: Kubelet, checkpoints: Path) -> None:
    job = the_job("job")
    first = [start(kubelet, index, job) for index in (0, 1)]
    for index, pod in enumerate(first):
        pod.until_out(f"rank {2 * index} of 4 from the start")
        pod.until_probed("/readyz", 200)
        pod.until_probed("/livez", 200)
    (checkpoints / "save").touch()
    first[0].until_out("saved")

    first[1].lose()
    first[0].until_probed("/readyz", 503)
    first[0].until_probed("/livez", 200)
    second = start(kubelet, 1, job)
    second.until_out("rank 2 of 4 from a checkpoint")
    first[0].until_out("rank 0 of 4 from a checkpoint")

    first[0].signal(signal.SIGTERM)  # an eviction of the pod with the control plane
    assert first[0].ends() == 75, first[0].err
    assert first[0].termination_message["ending"] == "infrastructure"
    third = start(kubelet, 0, job)
    third.until_out("rank 0 of 4 from a checkpoint")
    second.until_probed("/readyz", 200)

    (checkpoints / "finish").touch()
    assert (third.ends(), second.ends()) == (0, 0), third.err + second.err
    assert third.termination_message == {}


def test_an_evicted_pod_of_an_elastic_job_is_to_be_replaced(kubelet: Kubelet, checkpoints: Path) -> None:
    job = the_job("job")
    first = [start(kubelet, index, job, PET_NNODES="1:2") for index in (0, 1)]
    for index, pod in enumerate(first):
        pod.until_out(f"rank {2 * index} of 4 from the start")
    (checkpoints / "save").touch()
    first[0].until_out("saved")
    first[1].signal(signal.SIGTERM)
    assert first[1].ends() == 75, "with 0 its index would be complete"
    assert "continues on 1 other node" in first[1].termination_message["message"]
    first[0].until_out("rank 0 of 2 from a checkpoint")
    second = start(kubelet, 1, job, PET_NNODES="1:2")
    second.until_out("rank 2 of 4 from a checkpoint")
    first[0].until_out("rank 0 of 4 from a checkpoint")
    (checkpoints / "finish").touch()
    assert [pod.ends() for pod in (first[0], second)] == [0, 0]


def test_a_failure_of_the_program_ends_all_pods_with_its_code(kubelet: Kubelet, checkpoints: Path) -> None:
    (checkpoints / "save").touch()
    (checkpoints / "fail").touch()
    pods = [start(kubelet, index, the_job("job")) for index in (0, 1)]
    assert [pod.ends() for pod in pods] == [1, 1]
    for pod in pods:
        message = pod.termination_message
        assert (message["ending"], message["code"], message["cause"]["rank"]) == ("program", 1, 3)
        assert "ValueError: boom" in message["message"]


def test_a_job_at_the_control_plane_survives_the_loss_of_that(kubelet: Kubelet, checkpoints: Path) -> None:
    def control_plane() -> Pod:
        made = kubelet.start(of_kind(rendered("control-plane"), "Deployment"), "rallypoint", {})
        made.until_probed("/readyz", 200, 29480)
        made.until_probed("/livez", 200, 29480)
        made.until_probed("/status.json", 401, 29480)
        return made

    first = control_plane()
    pods = [start(kubelet, index, the_job("job-at-control-plane")) for index in (0, 1)]
    for index, pod in enumerate(pods):
        pod.until_out(f"rank {2 * index} of 4 from the start")
    (checkpoints / "save").touch()
    pods[0].until_out("saved")
    first.lose()
    second = control_plane()
    pods[1].lose()
    pods[1] = start(kubelet, 1, the_job("job-at-control-plane"))
    for index, pod in enumerate(pods):
        pod.until_out(f"rank {2 * index} of 4 from a checkpoint")
    (checkpoints / "finish").touch()
    assert [pod.ends() for pod in pods] == [0, 0]
    second.signal(signal.SIGTERM)
    assert second.ends() == 0


@pytest.mark.parametrize("name", SAMPLES)
def test_the_pods_of_the_samples_meet(kubelet: Kubelet, checkpoints: Path, name: str) -> None:
    """As JobSet names its pods, and with the variables that Trainer sets."""
    (checkpoints / "save").touch()
    trainer = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_MASTER_PORT": "29500"}
    trainer["PET_MASTER_ADDR"] = "train-node-0-0.train"
    given = trainer if name == "trainjob.yaml" else {}
    pods = []
    for index in (0, 1):
        rank = {"PET_NODE_RANK": str(index)} if given else {}
        pods.append(start(kubelet, index, the_job(name), "train-node-0", **given, **rank))
    for pod in pods:
        pod.until_started("of 4 from", workers=2)
    (checkpoints / "finish").touch()
    assert [pod.ends() for pod in pods] == [0, 0]
