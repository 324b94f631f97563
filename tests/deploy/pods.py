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
import signal
import subprocess
import sys
import time
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

    def until_probed(self, path: str, status: int) -> None:
        """Ask as the kubelet does, again and again, until the answer is this."""
        ask = "import sys, urllib.request as r, urllib.error as e\n"
        ask += "try:\n    print(r.urlopen(sys.argv[1], timeout=5).status)\nexcept e.HTTPError as error:\n"
        ask += "    print(error.code)\nexcept OSError as error:\n    print(error)"
        until = time.monotonic() + TIMEOUT
        url = f"http://{self._host.address}:29481{path}"
        while (said := self._host_output(sys.executable, "-c", ask, url)) != str(status):
            assert time.monotonic() < until, f"{path} is still {said}: {self.err}"
            time.sleep(0.1)

    def _host_output(self, *command: str) -> str:
        asked = [*self._host.entry, *command]
        return subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


class Kubelet:
    """Starts the pods of a Job.

    Args:
        network: where each pod gets an address.
        launcher: starts the processes, and checks that none is left.
        manifest: the Job.
        secret: what the Secret holds.
    """

    def __init__(self, network: Network, launcher: Launcher, manifest: Manifest, secret: str) -> None:
        self._network = network
        self._launcher = launcher
        self._name: str = manifest["metadata"]["name"]
        self._pod = pod_of(manifest)
        self._user: int = self._pod["securityContext"]["runAsUser"]
        self._folder = launcher.folder
        self._addresses: dict[int, str] = {}
        self._pods: list[Pod] = []
        self._hosts = self._folder / "hosts"
        self._hosts.touch()
        self._shared = {name: self._volume(self._folder, name) for name in ("secret", "checkpoints")}
        path = self._shared["secret"] / "secret"
        path.write_text(secret)
        os.chown(path, 0, self._user)
        path.chmod(0o440)

    def _volume(self, folder: Path, name: str) -> Path:
        path = folder / "volumes" / name
        path.mkdir(parents=True)
        os.chown(path, self._user, self._user)
        return path

    def start(self, index: int, arguments: list[str]) -> Pod:
        """Start the pod of this index, at an address of its own; also one that replaces another.

        Args:
            index: of the Job's completions.
            arguments: the program and its arguments, in the place of the manifest's.
        """
        host = self._network.add(f"pod{len(self._network.hosts)}")
        self._addresses[index] = host.address
        self._publish()
        folder = self._folder / host.name
        (folder / "volumes").mkdir(parents=True)
        (folder / "termination-log").touch()
        os.chown(folder / "termination-log", self._user, self._user)
        for name, path in self._shared.items():
            (folder / "volumes" / name).symlink_to(path)
        self._volume(folder, "tmp")
        (container,) = self._pod["containers"]
        flags = list(itertools.takewhile(lambda each: each.startswith("-"), container["args"]))
        given = {**variables(container), **self._given(index)}
        command = ["env", "-i", *(f"{name}={self._moved(value)}" for name, value in given.items())]
        command += [*container["command"], *(self._moved(each) for each in (*flags, *arguments))]
        enter = ["nsenter", f"--net=/run/netns/{host.namespace}", "unshare", "--uts", "--mount", "--pid", "--fork"]
        start = [*enter, "sh", "-c", _START, "sh", f"{self._name}-{index}", str(self._hosts)]
        job = self._launcher.command([*start, str(self._folder), str(folder), str(self._user), *command])
        pod = Pod(job, host, folder)
        self._pods.append(pod)
        return pod

    def close(self) -> None:
        """End what runs. (Who has become another user does not end with its parent.)"""
        for pod in self._pods:
            with suppress(OSError):
                pod.lose()

    def _given(self, index: int) -> dict[str, str]:
        """What Kubernetes and the image add to a container's environment."""
        path = f"{Path(sys.executable).parent}:{os.defpath}"
        mark = {name: value for name, value in self._launcher.environment().items() if name == "RALLYPOINT_TEST_MARK"}
        return {
            "PATH": path,
            "HOSTNAME": f"{self._name}-{index}",
            "JOB_COMPLETION_INDEX": str(index),
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            "KUBERNETES_SERVICE_PORT": "443",
            **mark,
        }

    def _moved(self, text: str) -> str:
        """A path in a volume as it is here."""
        (container,) = self._pod["containers"]
        for each in container["volumeMounts"]:
            place: str = each["mountPath"]
            if each["name"] != "shm" and (text == place or text.startswith(place + "/")):
                return f"/mnt/{each['name']}{text.removeprefix(place)}"
        return text

    def _publish(self) -> None:
        """Write the names in place: the file is mounted."""
        domain = f"{self._pod['subdomain']}.default.svc.cluster.local"
        names = ((f"{self._name}-{index}", address) for index, address in self._addresses.items())
        self._hosts.write_text(
            "127.0.0.1 localhost\n" + "".join(f"{at} {name}.{domain} {name}\n" for name, at in names)
        )
