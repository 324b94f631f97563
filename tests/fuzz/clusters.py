"""Targets for clusters: their variables, and what `rallyctl launch` reads from people and from ssh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from rallypoint.base.errors import UsageError
from rallypoint.clusters.detect import FAMILIES, find, job_file, started_with_others
from rallypoint.clusters.findings import Cluster, DetectionRefusal, Machine
from rallypoint.clusters.hostlist import MAX_HOSTS
from rallypoint.clusters.remote.inputs import Host, file_variables, parse_hostfile, parse_hosts
from rallypoint.clusters.remote.messages import (
    Ended,
    Prepare,
    SupervisorHello,
    decode_answer,
    decode_request,
    encode,
    end_mark,
)
from rallypoint.clusters.remote.output import PrefixedLines
from rallypoint.clusters.remote.ssh import SshOptions, why_unreachable
from tests.fuzz.target import Target
from tests.unit.cluster.test_platforms import ROWS

_KINDS = ("auto", *(family.flag for family in FAMILIES))


def environment(data: bytes) -> None:
    """An environment, a variable a line, and behind an empty line the text of /etc/hosts and of the job's file."""
    variables, _, hosts = data.decode("utf-8", "surrogateescape").partition("\n\n")
    environ = {name: text for name, _, text in (line.partition("=") for line in variables.split("\n"))}
    machine = Machine(
        hostname=environ.get("HOSTNAME", ""),
        hosts_file=hosts,
        ephemeral=hosts[:40],
        cpu_quota=hosts[:40],
        job_file=hosts,
    )
    started_with_others(environ)
    job_file(environ)
    for kind in _KINDS:
        try:
            finding = find(kind, environ, machine)
        except UsageError as error:
            finding = DetectionRefusal(str(error))
        if isinstance(finding, Cluster):
            assert 0 <= finding.index < (finding.nodes or MAX_HOSTS)
            assert 0 < finding.port < 65536 or not finding.host
            assert f"{finding.title}{finding.host}{finding.job_id}{finding.remark}".isprintable()
            assert all(map(str.isprintable, finding.wanted.values()))
        else:
            assert finding.sentence.isprintable()


def hosts(data: bytes) -> None:
    """A host file, a list of hosts, a file of variables."""
    with suppress(UsageError):
        found = parse_hostfile(data, "hosts")
        assert all(host.target[0] != "-" for host in found)
    with suppress(UsageError):
        assert all(host.target[0] != "-" for host in parse_hosts(data.decode(errors="replace")))
    with suppress(UsageError):
        file_variables(data, "env", {})


def messages(data: bytes) -> None:
    """Lines of a supervisor, of a login shell and of a launcher."""
    for decode in (decode_answer, decode_request):
        with suppress(ValueError):
            decode(data)
    lines = PrefixedLines(b"a: ", end_mark("77"))
    lines.feed(data[: len(data) // 2])
    lines.feed(data[len(data) // 2 :])
    lines.progress_bar()
    lines.finish()
    code = data[0] if data else None
    assert why_unreachable(Host("a"), SshOptions((), "python", 10, 30), code, data).isprintable()


def _environments() -> Sequence[bytes]:
    step = ["SLURM_JOB_ID=12", "SLURM_STEP_ID=0", "SLURM_STEP_NUM_NODES=2", "SLURM_STEP_NODELIST=n[1-2]"]
    step += ["SLURM_NODEID=1", "SLURM_PROCID=1", "SLURMD_NODENAME=n2", "SLURM_STEP_TASKS_PER_NODE=1(x2)"]
    pod = ["JOB_COMPLETION_INDEX=1", "JOB_COMPLETIONS=4", "HOSTNAME=train-1"]
    hosts = "\n\n10.0.0.1 train-1.workers.default.svc train-1\n"
    ranks = ["PMI_SIZE=2", "PMI_RANK=1", "MPI_LOCALNRANKS=1"]
    seeds = ["\n".join(step).encode(), ("\n".join(pod) + hosts).encode(), "\n".join(ranks).encode()]
    for row in ROWS:
        variables = "\n".join(f"{name}={text}" for name, text in row.environ.items() if "\n" not in text)
        seeds.append(f"{variables}\nHOSTNAME={row.machine.hostname}\n\n{row.machine.job_file}".encode())
    return seeds


def _hosts() -> list[bytes]:
    return [b"a slots=8\nu@b:2\n[fd00::1]:3 # x\n", b"a,b:8,[fd00::1]", b"A=1\n# x\nB"]


def _messages() -> list[bytes]:
    return [
        encode(SupervisorHello("0.1.0", "10.0.0.1")),
        encode(Prepare(["a"], "/", {"A": "1"}, 30, 60, "77")),
        b"line\n" + end_mark("77") + encode(Ended(1, "why")),
        b"ssh: connect to host a port 22: Connection refused\n",
    ]


_DECODING = (
    *("batch", "detect", "findings", "hostlist"),
    *("kubernetes", "mpi", "platforms", "ports", "slurm"),
)

TARGETS: Mapping[str, Target] = {
    "cluster-environment": Target(
        environment,
        _environments,
        tuple(f"clusters/{name}.py" for name in _DECODING),
        2000,
    ),
    "hosts": Target(hosts, _hosts, ("clusters/remote/inputs.py",)),
    "remote-messages": Target(messages, _messages, ("clusters/remote/messages.py", "clusters/remote/ssh.py")),
}
