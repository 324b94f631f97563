"""Pods of a rendered Job, run as the kubelet would, as far as one machine can without a container runtime.

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
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.deploy.manifests import Manifest, pod_of, variables
from tests.faults.network import Host, Network
from tests.jobs.launching import TIMEOUT, Job, Launcher

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
        until = time.monotonic() + TIMEOUT
        url = f"http://{self._host.address}:{port}{path}"
        while (said := self._host_output(sys.executable, "-c", ask, url)) != str(status):
            assert time.monotonic() < until, f"{path} is still {said}: {self.err}"
            time.sleep(0.1)

    def _host_output(self, *command: str) -> str:
        asked = [*self._host.entry, *command]
        return subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


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
