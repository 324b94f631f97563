"""The target that a cluster writes: its variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rallypoint.base.errors import UsageError
from rallypoint.clusters.detect import Cluster, Machine, Refusal, find, started_with_others
from rallypoint.clusters.hostlist import MAX_HOSTS
from tests.fuzz.target import Target

_KINDS = ("auto", "slurm", "mpi", "k8s")


def environment(data: bytes) -> None:
    """An environment, a variable a line, and behind an empty line the text of /etc/hosts."""
    variables, _, hosts = data.decode("utf-8", "surrogateescape").partition("\n\n")
    environ = {name: text for name, _, text in (line.partition("=") for line in variables.split("\n"))}
    machine = Machine(
        hostname=environ.get("HOSTNAME", ""), hosts_file=hosts, ephemeral=hosts[:40], cpu_quota=hosts[:40]
    )
    started_with_others(environ)
    for kind in _KINDS:
        try:
            finding = find(kind, environ, machine)
        except UsageError as error:
            finding = Refusal(str(error))
        if isinstance(finding, Cluster):
            assert 0 <= finding.index < (finding.nodes or MAX_HOSTS)
            assert 0 < finding.port < 65536 or not finding.host
            assert f"{finding.title}{finding.host}{finding.job_id}{finding.remark}".isprintable()
            assert all(map(str.isprintable, finding.wanted.values()))
        else:
            assert finding.sentence.isprintable()


def _environments() -> Sequence[bytes]:
    step = ["SLURM_JOB_ID=12", "SLURM_STEP_ID=0", "SLURM_STEP_NUM_NODES=2", "SLURM_STEP_NODELIST=n[1-2]"]
    step += ["SLURM_NODEID=1", "SLURM_PROCID=1", "SLURMD_NODENAME=n2", "SLURM_STEP_TASKS_PER_NODE=1(x2)"]
    pod = ["JOB_COMPLETION_INDEX=1", "JOB_COMPLETIONS=4", "HOSTNAME=train-1"]
    hosts = "\n\n10.0.0.1 train-1.workers.default.svc train-1\n"
    ranks = ["PMI_SIZE=2", "PMI_RANK=1", "MPI_LOCALNRANKS=1"]
    return ["\n".join(step).encode(), ("\n".join(pod) + hosts).encode(), "\n".join(ranks).encode()]


TARGETS: Mapping[str, Target] = {
    "cluster-environment": Target(
        environment,
        _environments,
        tuple(f"clusters/{name}.py" for name in ("detect", "hostlist")),
        2000,
    ),
}
