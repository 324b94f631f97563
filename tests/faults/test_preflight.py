"""`rallyctl check` on machines on which something is wrong: a small /dev/shm, low limits, full disks, names, the way to
the endpoint, and what hangs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.preflight.checks import NAMES
from rallypoint.preflight.disks import disk_facts, judge_space
from rallypoint.preflight.limits import judge_processes, read_limits
from rallypoint.preflight.look_up import LOOK_UP
from rallypoint.preflight.reaching import CONNECT
from rallypoint.preflight.run import DEADLINE, run_checks
from rallypoint.preflight.table import CheckInputs
from tests.faults.network import Network, network, why_not
from tests.faults.other_user import as_other_user
from tests.jobs.launching import RALLYRUN, TIMEOUT, Launcher, launching
from tests.unit.preflight.test_machine import library

PORT = 29400
CHECK = [sys.executable, "-m", "rallypoint.cli.rallyctl", "check"]


def check(entry: list[str], *flags: str, env: dict[str, str] | None = None) -> dict[str, tuple[str, str]]:
    """Run the command, by way of another; the status and the text of each check."""
    steering = ("PET_", "RALLYPOINT", "http_", "https_", "HTTP", "no_proxy", "NO_PROXY")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(steering)}
    command = [*entry, *CHECK, "--json", *flags]
    done = subprocess.run(command, env={**kept, **(env or {})}, capture_output=True, text=True, timeout=60, check=False)
    assert not done.stderr, done.stderr
    told = json.loads(done.stdout)
    assert done.returncode == {"PASS": 0, "WARN": 1, "FAIL": 2}[told["status"]]
    return {each["name"]: (each["status"], f"{each['fact']}; {each['remedy']}") for each in told["checks"]}


def mounting(script: str, *arguments: str) -> list[str]:
    """What a command line begins with to run where this script has mounted something, with these as $1, $2."""
    count = len(arguments)
    return ["unshare", "--mount", "--uts", "sh", "-ec", f'{script}; shift {count}; exec "$@"', "sh", *arguments]


@pytest.fixture(autouse=True)
def possible() -> None:
    if os.geteuid() != 0:
        pytest.skip("FAULT TESTS DID NOT RUN: needs root, to make namespaces")


@pytest.fixture
def rallyrun(tmp_path: Path) -> Iterator[Launcher]:
    with launching(tmp_path) as made:
        yield made


def test_the_shared_memory_that_docker_gives_fails() -> None:
    found = check(mounting("mount -t tmpfs -o size=64m tmpfs /dev/shm"))
    status, text = found["shared-memory"]
    assert status == "FAIL"
    assert "/dev/shm has 64 MiB of 64 MiB free" in text
    assert "--shm-size" in text
    assert check(mounting("mount -t tmpfs -o ro tmpfs /dev/shm"))["shared-memory"][0] == "FAIL"
    assert check(mounting("mount -t tmpfs -o size=2g tmpfs /dev/shm"))["shared-memory"][0] == "PASS"


def test_low_limits_fail() -> None:
    found = check(["prlimit", "--nofile=200:200"])
    assert found["open-files"][0] == "FAIL"
    assert "a process may have 200 open files (hard limit: 200)" in found["open-files"][1]
    assert check(["prlimit", "--nofile=1024:4096"])["open-files"][0] == "WARN"


def test_another_user_s_limit_of_processes_counts_and_its_rights(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)

    def look() -> list[tuple[str, str]]:
        import resource

        resource.setrlimit(resource.RLIMIT_NPROC, (1000, 1000))
        judged = [judge_processes(read_limits(CheckInputs())), judge_space(disk_facts("/proc/1/cwd"))]
        return [(each.status.value, each.fact) for each in judged]

    processes, space = as_other_user(look)
    assert processes == ("WARN", "this user may have 1000 processes and threads")
    assert space == ("FAIL", "/proc/1/cwd cannot be written to (Permission denied)")


def test_a_user_who_can_start_no_thread_and_no_process_is_told_so() -> None:
    run_checks(CheckInputs())  # so that nothing is left to be imported

    def look() -> list[tuple[str, str, str]]:
        import resource

        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        return [(each.name, each.status.value, each.fact) for each in run_checks(CheckInputs())]

    found = {name: (status, fact) for name, status, fact in as_other_user(look)}
    assert tuple(found) == NAMES
    assert found["processes"] == ("FAIL", "this user may have 0 processes and threads")
    assert found["temp-space"][0] == "WARN"
    assert found["temp-space"][1].startswith("the process that checks cannot be started (")


@pytest.mark.parametrize(
    ("options", "fill", "words"),
    [
        ("size=1m", "head -c 2m /dev/zero > $1/ballast 2>/dev/null || true", "No space left on device"),
        ("size=500m", "true", "500 MiB of 500 MiB free"),
        ("size=2g,nr_inodes=50", "true", "more files (inodes)"),
        ("ro", "true", "Read-only file system"),
    ],
)
def test_a_folder_without_room_fails(tmp_path: Path, options: str, fill: str, words: str) -> None:
    (tmp_path / "file system").mkdir()
    folder = str(tmp_path / "file system")
    entry = mounting(f'mount -t tmpfs -o {options} tmpfs "$1"; {fill.replace("$1", chr(34) + "$1" + chr(34))}', folder)
    as_log_dir = check(entry, f"--log-dir={folder}/logs/of/jobs")["log-space"]
    assert as_log_dir[0] == ("WARN" if "500" in words else "FAIL")
    assert words in as_log_dir[1]
    as_temporary = check(entry, env={"TMPDIR": folder})["temp-space"]
    assert as_temporary == as_log_dir


def test_a_log_folder_that_is_a_file_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "Not a directory" in check([], f"--log-dir={tmp_path}/file")["log-space"][1]


NAMED = 'hostname node7; mount --bind "$1" /etc/hosts; mount --bind "$2" /etc/resolv.conf'


@pytest.fixture
def net() -> Iterator[Network]:
    if reason := why_not():
        pytest.skip(f"FAULT TESTS DID NOT RUN: {reason}")
    with network("n1", "n2") as made:
        yield made


def named(folder: Path, hosts: str, resolver: str = "") -> list[str]:
    """On a machine that is called node7, with these files."""
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}\n")
    (folder / "resolv.conf").write_text(resolver)
    return mounting(NAMED, str(folder / "hosts"), str(folder / "resolv.conf"))


@pytest.mark.parametrize(
    ("hosts", "status", "words"),
    [
        ("127.0.1.1 node7", "WARN", "node7 is 127.0.1.1, a loopback address"),
        ("", "WARN", "node7 does not resolve"),
        ("10.99.99.99 node7", "WARN", "10.99.99.99 is not an address of this machine"),
        ("10.77.0.1 node7", "PASS", "node7 is 10.77.0.1"),
    ],
)
def test_the_name_of_the_machine(net: Network, tmp_path: Path, hosts: str, status: str, words: str) -> None:
    found = check([*net.hosts[0].entry, *named(tmp_path, hosts)])["host-name"]
    assert found[0] == status
    assert words in found[1]


LISTENER = """
import socket, sys
with socket.create_server(("", int(sys.argv[1]))) as server:
    print("ready", flush=True)
    while True:
        server.accept()[0].sendall(b"SSH-2.0-something else\\r\\n")
"""


def test_the_way_to_the_endpoint(net: Network, tmp_path: Path) -> None:
    """Nobody listens, a foreign service does, the host is silent, there is no route, the name is unknown."""
    here, there = net.hosts
    entry = [*here.entry, *named(tmp_path, f"{there.address} node1\n10.99.0.1 far\n")]
    found = check(entry, f"--endpoint=node1:{PORT}")
    assert found["endpoint"] == (
        "PASS",
        f"node1:{PORT}: {there.address} is reached, and nobody listens at the port; ",
    )
    assert "nobody listens" in found["control-plane"][1]
    assert "node1 is not this machine" in found["port"][1]
    listener = [*there.entry, sys.executable, "-c", LISTENER, str(PORT)]
    with subprocess.Popen(listener, stdout=subprocess.PIPE) as service:
        assert service.stdout is not None
        assert service.stdout.readline() == b"ready\n"
        try:
            found = check(entry, f"--endpoint=node1:{PORT}")
        finally:
            service.kill()
    assert found["endpoint"][0] == "PASS"
    assert found["control-plane"][0] == "FAIL"
    assert f"what listens at node1:{PORT} is not Rallypoint's control plane" in found["control-plane"][1]
    far = check(entry, f"--endpoint=far:{PORT}")["endpoint"]
    assert far[0] == "FAIL"
    assert "10.99.0.1 cannot be reached (Network is unreachable)" in far[1]
    unknown = check(entry, f"--endpoint=unknown:{PORT}")["endpoint"]
    assert unknown[0] == "FAIL"
    assert "unknown does not resolve" in unknown[1]


def test_a_host_that_does_not_answer_is_given_up_in_time(net: Network, tmp_path: Path) -> None:
    here, there = net.hosts
    subprocess.run(
        [*there.entry, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/icmp_echo_ignore_all"], check=True, timeout=30
    )
    subprocess.run([*here.entry, "ping", "-c1", "-W1", there.address], check=False, capture_output=True, timeout=30)
    there.cut_off()
    begun = time.monotonic()
    found = check([*here.entry, *named(tmp_path, "")], f"--endpoint={there.address}:{PORT}")["endpoint"]
    assert time.monotonic() - begun < CONNECT + 90, "the kernel would try for two minutes"
    assert found[0] == "FAIL"
    assert f"{there.address}:{PORT}: does not answer" in found[1] or "No route to host" in found[1]


SILENT_DNS = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
    server.bind(("", 53))
    print("ready", flush=True)
    while True:
        server.recv(4096)
"""


def test_a_dns_server_that_never_answers_does_not_hold_up_the_others(net: Network, tmp_path: Path) -> None:
    here, there = net.hosts
    entry = [*here.entry, *named(tmp_path, "", f"nameserver {there.address}\noptions timeout:30 attempts:5\n")]
    with subprocess.Popen([*there.entry, sys.executable, "-c", SILENT_DNS], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        begun = time.monotonic()
        try:
            found = check(entry, f"--endpoint=node1.cluster:{PORT}")
        finally:
            server.kill()
    assert time.monotonic() - begun < LOOK_UP + 90, "the resolver would wait for 150 s"
    assert found["host-name"][0] == "WARN"
    assert "nobody answers what node7 stands for within 6 s" in found["host-name"][1]
    assert found["endpoint"][0] == "FAIL"
    assert "nobody answers what node1.cluster stands for" in found["endpoint"][1]
    assert found["shared-memory"][0] == check([])["shared-memory"][0]


DEAD_FILE_SYSTEM = """
import ctypes, os, sys
fuse = os.open("/dev/fuse", os.O_RDWR)
libc = ctypes.CDLL(None, use_errno=True)
options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
assert libc.mount(b"dead", sys.argv[1].encode(), b"fuse", 0, options) == 0, os.strerror(ctypes.get_errno())
os.set_inheritable(fuse, True)
os.execvp(sys.argv[2], sys.argv[2:])
"""

IN_TIME = """
import sys, time
from rallypoint.preflight.run import run_checks
from rallypoint.preflight.table import CheckInputs
for each in run_checks(CheckInputs(sys.argv[1]), 12.0):
    print(each)
"""


def test_a_dead_file_system_is_told_and_does_not_keep_the_command_from_ending(tmp_path: Path) -> None:
    """As of NFS whose server is gone: whoever asks the folder anything waits for ever."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("FAULT TEST DID NOT RUN: there is no /dev/fuse, by which a file system can be dead")
    folder = tmp_path / "dead"
    folder.mkdir()
    command = ["unshare", "--mount", sys.executable, "-c", DEAD_FILE_SYSTEM, str(folder)]
    command += [sys.executable, "-c", IN_TIME, str(folder / "logs")]
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert time.monotonic() - begun < 100
    assert done.returncode == 0, done.stderr
    lines = {line.split()[1].rstrip(":"): line for line in done.stdout.splitlines()}
    assert lines["log-space"].startswith("FAIL log-space: the log folder does not answer; if it is a network file")
    assert lines["temp-space"].startswith("PASS")


def test_whoever_is_held_up_by_a_dead_file_system_can_be_ended_and_leaves_nothing(rallyrun: Launcher) -> None:
    """Before anything else asks the folder."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("FAULT TEST DID NOT RUN: there is no /dev/fuse, by which a file system can be dead")
    folder = rallyrun.folder / "dead"
    folder.mkdir()
    entry = ["unshare", "--mount", sys.executable, "-c", DEAD_FILE_SYSTEM, str(folder)]
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        job = rallyrun.command([*entry, *RALLYRUN, "--preflight=require", f"--log-dir={folder}/logs", "train.py"])
        deadline = time.monotonic() + TIMEOUT
        while not (checking := [each for each in rallyrun.left() if "rallypoint.preflight.run" in each]):
            assert time.monotonic() < deadline, "the process that checks is not there"
            threading.Event().wait(0.02)
        job.signal(number)
        assert job.ends() == -number
        rallyrun.until_gone(int(checking[0].partition(":")[0]))


GPU_NODES = """
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work"
mount -t overlay -o "lowerdir=/dev,upperdir=$1/upper,workdir=$1/work" overlay /dev
touch /dev/nvidia0 /dev/nvidia1 /dev/nvidia2 /dev/nvidia3"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="FAULT TEST DID NOT RUN: no C compiler for a stand-in of NVML")
def test_gpus_that_are_lost_or_worn_are_told_by_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "nodes").mkdir()
    entry = mounting(GPU_NODES, str(tmp_path / "nodes"))
    found = check(entry, env={"LD_LIBRARY_PATH": str(tmp_path / "none")})
    assert found["gpus"][0] == "WARN"
    assert "libnvidia-ml.so.1 is not there, so nothing is known of 4 GPUs" in found["gpus"][1]
    library(tmp_path, "-DBROKEN=0")
    found = check(entry, env={"LD_LIBRARY_PATH": str(tmp_path)})
    assert found["gpus"][0] == "FAIL"
    assert "1 of 4 GPUs do not answer: GPU 3 (GPU is lost)" in found["gpus"][1]
    assert found["gpu-memory"][0] == "FAIL"
    assert "could not be replaced on 0000:03:00.0" in found["gpu-memory"][1]
    library(tmp_path, "-DBROKEN=(abort(),1)", "-include", "stdlib.h")
    begun = time.monotonic()
    found = check(entry, env={"LD_LIBRARY_PATH": str(tmp_path)})
    assert time.monotonic() - begun < DEADLINE
    assert found["gpus"][0] == "WARN"
    assert "the process that checks ended with code -6 before it answered" in found["gpus"][1]
    assert found["open-files"][0] == check([])["open-files"][0]


def test_locked_memory_is_judged_where_there_is_infiniband() -> None:
    device = "mount -t tmpfs tmpfs /sys/class; mkdir -p /sys/class/infiniband/mlx5_0"
    low = mounting(f"{device}; prlimit --pid $$ --memlock=65536")
    status, text = check(low)["locked-memory"]
    assert (status, "without limit for mlx5_0" in text) == ("PASS", True), "root may lock memory"
    status, text = check([*low, "setpriv", "--bounding-set=-ipc_lock"])["locked-memory"]
    assert status == "FAIL"
    assert "0.0625 MiB may be locked, and mlx5_0 needs more; set `ulimit -l unlimited`" in text


def test_proxies_that_would_divert_the_endpoint() -> None:
    proxy = {"https_proxy": "http://me:password@proxy:3128", "no_proxy": "localhost,.internal"}
    caught = check([], f"--endpoint=10.255.0.9:{PORT}", env=proxy)["proxy"]
    assert caught[0] == "WARN"
    assert "no_proxy does not spare 10.255.0.9" in caught[1]
    assert "password" not in caught[1]
    assert check([], f"--endpoint=localhost:{PORT}", env=proxy)["proxy"][0] == "PASS"


def test_a_port_from_which_connections_go_out(net: Network, tmp_path: Path) -> None:
    here = net.hosts[0]
    entry = [*here.entry, *named(tmp_path, "")]
    clash = check(entry, f"--endpoint={here.address}:45000")["port"]
    assert clash[0] == "WARN"
    assert "net.ipv4.ip_local_reserved_ports=45000" in clash[1]
    reserve = [*here.entry, "sh", "-c", "echo 44000-46000 > /proc/sys/net/ipv4/ip_local_reserved_ports"]
    subprocess.run(reserve, check=True, timeout=30)
    assert check(entry, f"--endpoint={here.address}:45000")["port"][0] == "PASS"
