"""The Job of `deploy/kubernetes/job` in pods of namespaces: what it survives, and what is told of its end.

Pods are run as the kubelet would, as far as one machine can without a container runtime.

A pod is process 1 of its own namespaces of processes, mounts, network and names, as the user of its `securityContext`,
with the root file system read-only, no capability but that to read files (this Python may lie in another user's home),
and no environment but what its manifest gives. Its volumes, and the folder of the launcher as that of the program, are
at /mnt, where the root file system of this machine has room for them. Names are in a hosts file that all pods see, as
DNS would be, and change with it.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rallypoint.base.secrets import new_secret
from rallypoint.cli.verdict import IN_PLACE
from tests.deploy.manifests import SAMPLES, Manifest, of_kind, pod_of, rendered, the_job, variables, with_component
from tests.faults import network
from tests.faults.network import Host, Network
from tests.jobs.launching import Job, Launcher
from tests.processes import completed
from tests.waiting import until

_START = """
set -e
hostname "$1"; hosts=$2; app=$3; pod=$4; user=$5; shift 5
mount --make-rprivate /
mount -t proc proc /proc
mount --bind "$hosts" /etc/hosts
mount -t tmpfs -o mode=755 pod /mnt
mkdir /mnt/dev /mnt/app; mount --bind "$app" /mnt/app; cd /mnt/app
for each in "$pod"/volumes/*; do at=/mnt/${each##*/}; mkdir "$at"; mount --bind "$each" "$at"; done
cd /mnt/dev
for each in null zero full random urandom; do touch $each; mount --bind /dev/$each $each; done
mkdir shm; mount -t tmpfs -o mode=1777 shm shm
touch termination-log; mount --bind "$pod/termination-log" termination-log
mount --rbind /mnt/dev /dev
mount -o remount,bind,ro /mnt; mount -o remount,bind,ro /mnt/app; mount -o remount,bind,ro /
cd /mnt/app
only=-all,+dac_read_search
exec setpriv --reuid="$user" --regid="$user" --clear-groups --no-new-privs \
    --inh-caps=$only --ambient-caps=$only --bounding-set=$only -- "$@"
"""


_USER = 1000


class Pod:
    """One pod that runs, or has run."""

    def __init__(self, job: Job, host: Host, folder: Path) -> None:
        self._job = job
        self._host = host
        self._folder = folder

    @property
    def out(self) -> list[str]:
        """Lines of standard output so far."""
        return self._job.out

    @property
    def err(self) -> str:
        """Standard error so far."""
        return self._job.err

    def signal(self, number: int) -> None:
        """To its process 1, as a container's runtime does. Raises OSError where it has ended."""
        entered = self._job.pid
        children = Path(f"/proc/{entered}/task/{entered}/children").read_text().split()
        if not children:
            raise ProcessLookupError("the pod has ended")
        os.kill(int(children[0]), number)

    def lose(self) -> None:
        """End it at once, and all that is in it, as when its machine is lost."""
        self.signal(signal.SIGKILL)
        self._job.ends()

    def ends(self) -> int:
        """Wait for the end; returns the exit code."""
        return self._job.ends()

    @property
    def termination_message(self) -> dict[str, Any]:
        """What `kubectl describe pod` would show; empty for nothing."""
        text = (self._folder / "termination-log").read_text()
        return dict(json.loads(text)) if text else {}

    def until_out(self, text: str) -> None:
        """Wait until a line of standard output is this."""
        self._job.until(lambda out: text in out, text)

    def until_started(self, text: str, workers: int) -> None:
        """Wait until so many lines of standard output hold this."""
        self._job.until(lambda out: sum(text in line for line in out) == workers, f"{workers} times {text}")

    def until_probed(self, path: str, status: int, port: int = 29481) -> None:
        """Ask as the kubelet does, again and again, until the answer is this."""
        ask = "import sys, urllib.request as r, urllib.error as e\n"
        ask += "try:\n    print(r.urlopen(sys.argv[1], timeout=5).status)\nexcept e.HTTPError as error:\n"
        ask += "    print(error.code)\nexcept OSError as error:\n    print(error)"
        command = [*self._host.entry, sys.executable, "-c", ask, f"http://{self._host.address}:{port}{path}"]
        said: list[str] = []

        def is_status() -> bool:
            said.append(completed(command, check=True).stdout.strip())
            return said[-1] == str(status)

        until(is_status, lambda: f"{path} is {status}, but {said[-1]}: {self.err}")


class Kubelet:
    """Starts pods, and has what they share: a Secret, claimed volumes, names.

    Args:
        network: where each pod gets an address.
        launcher: starts the processes, and checks that none is left.
        secret: the files of the Secret.
    """

    def __init__(self, network: Network, launcher: Launcher, secret: Mapping[str, str]) -> None:
        self._network = network
        self._launcher = launcher
        self._addresses: dict[str, str] = {}
        self._pods: list[Pod] = []
        self._hosts = launcher.folder / "hosts"
        self._hosts.touch()
        self._shared = {name: self._volume(launcher.folder, name) for name in ("secret", "checkpoints")}
        for name, text in secret.items():
            path = self._shared["secret"] / name
            path.write_text(text)
            os.chown(path, 0, _USER)
            path.chmod(0o440)

    @staticmethod
    def _volume(folder: Path, name: str) -> Path:
        path = folder / "volumes" / name
        path.mkdir(parents=True)
        os.chown(path, _USER, _USER)
        return path

    def start(self, workload: Manifest, names: str, given: Mapping[str, str], program: Sequence[str] = ()) -> Pod:
        """Start a pod at an address of its own; also one that replaces another.

        Args:
            workload: the Job or Deployment.
            names: under which it is found, as in /etc/hosts; the last one is its host name.
            given: what Kubernetes adds to its environment.
            program: takes the place of the manifest's program and its arguments.
        """
        pod = pod_of(workload)
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsUser"] == _USER
        host = self._network.add(f"pod{len(self._network.hosts)}")
        self._addresses[names] = host.address
        # In place, since the file is mounted.
        self._hosts.write_text("".join(f"{at} {name}\n" for name, at in [("localhost", "127.0.0.1"), *self._at()]))
        folder = self._launcher.folder / host.name
        (folder / "volumes").mkdir(parents=True)
        (folder / "termination-log").touch()
        os.chown(folder / "termination-log", _USER, _USER)
        for each in pod["volumes"]:
            if each["name"] in self._shared:
                (folder / "volumes" / each["name"]).symlink_to(self._shared[each["name"]])
            elif each["name"] != "shm":
                self._volume(folder, each["name"])
        own = self._environment(names.rsplit(maxsplit=1)[-1])
        env = {**own, **variables(container), **given}
        words = [*container["command"], *self._arguments(container, program)]
        enter = ["nsenter", f"--net=/run/netns/{host.namespace}", "unshare", "--uts", "--mount", "--pid", "--fork"]
        start = [*enter, "sh", "-c", _START, "sh", env["HOSTNAME"], str(self._hosts), str(self._launcher.folder)]
        start += [str(folder), str(_USER), "env", "-i"]
        start += [f"{name}={value if name in own else _moved(value, container)}" for name, value in env.items()]
        job = self._launcher.command([*start, *(_moved(_expanded(each, env), container) for each in words)])
        made = Pod(job, host, folder)
        self._pods.append(made)
        return made

    def _at(self) -> list[tuple[str, str]]:
        return list(self._addresses.items())

    @staticmethod
    def _arguments(container: Manifest, program: Sequence[str]) -> list[str]:
        arguments = container.get("args", [])
        if not program:
            return list(arguments)
        return [*itertools.takewhile(lambda each: each.startswith("-"), arguments), *program]

    def _environment(self, hostname: str) -> dict[str, str]:
        """What Kubernetes and the image add to every container's environment."""
        mark = {name: value for name, value in self._launcher.environment().items() if name == "RALLYPOINT_TEST_MARK"}
        return {
            "PATH": f"{Path(sys.executable).parent}:{os.defpath}",
            "HOSTNAME": hostname,
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            "KUBERNETES_SERVICE_PORT": "443",
            **mark,
        }

    def close(self) -> None:
        """End what runs. (Who has become another user does not end with its parent.)"""
        for pod in self._pods:
            with suppress(OSError):
                pod.lose()


def _expanded(text: str, env: Mapping[str, str]) -> str:
    """With `$(NAME)` replaced, as in a container's command and arguments."""
    return re.sub(r"\$\((\w+)\)", lambda match: env.get(match[1], match[0]), text)


def _moved(text: str, container: Manifest) -> str:
    """A path in a volume as it is here; also behind the = of a flag."""
    for each in container["volumeMounts"]:
        if each["name"] != "shm":
            text = re.sub(rf"(^|=){each['mountPath']}(?=/|$)", rf"\g<1>/mnt/{each['name']}", text)
    return text


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


def test_a_jobset_grows_and_shrinks(kubelet: Kubelet, checkpoints: Path) -> None:
    """As the Job controller does: pods with the next indices come, and those with the highest leave."""
    job = the_job("jobset-elastic.yaml")
    first = start(kubelet, 0, job, "train-node-0")
    first.until_out("rank 0 of 2 from the start")
    (checkpoints / "save").touch()
    first.until_out("saved")
    second = start(kubelet, 1, job, "train-node-0")
    second.until_out("rank 2 of 4 from a checkpoint")
    first.until_out("rank 0 of 4 from a checkpoint")
    second.signal(signal.SIGTERM)
    assert second.ends() == 75, "nobody counts it: the Job has fewer indices by now"
    first.until_out("rank 0 of 2 from a checkpoint")
    (checkpoints / "finish").touch()
    assert first.ends() == 0


def test_a_container_whose_pod_is_not_the_reason_is_started_again_there(
    kubelet: Kubelet, checkpoints: Path, tmp_path: Path
) -> None:
    job = of_kind(with_component("in-place", tmp_path), "Job")
    (container,) = pod_of(job)["containers"]
    container["command"] = [each.replace("join_timeout=1800", "join_timeout=3") for each in container["command"]]
    lonely = start(kubelet, 0, job)
    assert lonely.ends() == IN_PLACE, "the other pod has not come"
    assert (lonely.termination_message["ending"], lonely.termination_message["code"]) == ("infrastructure", IN_PLACE)
    again = [start(kubelet, index, job) for index in (0, 1)]
    for index, pod in enumerate(again):
        pod.until_out(f"rank {2 * index} of 4 from the start")
    (checkpoints / "save").touch()
    (checkpoints / "finish").touch()
    assert [pod.ends() for pod in again] == [0, 0]


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
