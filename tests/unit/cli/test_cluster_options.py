"""Flags that `--cluster` sets, and the warning without it."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import pytest

from rallypoint.base.devices import cpu_count
from rallypoint.base.errors import UsageError, UserError
from rallypoint.cli import cluster_options
from rallypoint.cli.cluster_options import this_machine, warn_of_own_worlds, with_cluster
from rallypoint.cli.parse import Options, parse
from rallypoint.cli.rallyrun import _SEVERAL_NODES
from rallypoint.clusters.detect import started_with_others
from rallypoint.clusters.findings import Machine
from rallypoint.clusters.mpi import LAUNCHERS
from rallypoint.clusters.ports import control_port
from tests.unit.cluster.test_detect import BATCH, HYDRA, INDEXED, OPEN_MPI, POD, STEP, env
from tests.unit.cluster.test_platforms import DSTACK, FLUX, NODEFILE, PBS_TASK, SKYPILOT

MACHINE = Machine(hostname="n3", ephemeral="32768 60999")
ENDPOINT = f"n2:{control_port(12)[0]}"
FIRST = {**STEP, "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURMD_NODENAME": "n2"}


def filled(*flags: str, environ: dict[str, str] = STEP, machine: Machine = MACHINE) -> Options:
    return with_cluster(parse(["--cluster=auto", *flags, "train.py"], environ), environ, machine)


def meeting(options: Options) -> tuple[str, str, str, str, int]:
    return options.nnodes, options.rdzv_backend, options.rdzv_endpoint, options.rdzv_id, options.node_rank


def test_a_slurm_step() -> None:
    options = filled()
    assert meeting(options) == ("2", "c10d", ENDPOINT, "slurm-12.0.0", 1)
    assert options.nproc_per_node == str(min(2, cpu_count()))
    assert options.rdzv_conf == ""
    assert options.source("node_rank") == "SLURM_NODEID"
    assert filled(environ=FIRST).rdzv_conf == "is_host=true"
    assert filled("--rdzv-conf=lease=3", environ=FIRST).rdzv_conf == "lease=3,is_host=true"
    assert filled("--rdzv-conf=is_host=0", environ=FIRST).rdzv_conf == "is_host=0"
    assert filled("--rdzv-conf= is_host = 0", environ=FIRST).rdzv_conf == " is_host = 0"
    assert filled("--rdzv-conf=store_type=file", environ=FIRST).rdzv_endpoint == ""


@pytest.mark.parametrize("conf", ["tls_ca=/etc/this_host/ca.pem", "tls_ca=/x/store_type/ca", "this_host=1"])
def test_only_the_keys_of_options_count(conf: str) -> None:
    found = filled(f"--rdzv-conf={conf}", environ=FIRST)
    assert (found.rdzv_endpoint, found.rdzv_conf) == (ENDPOINT, f"{conf},is_host=true")
    with pytest.raises(UserError, match=r"--rdzv-conf: rendezvous options 'is_host' set no value for 'is_host'"):
        filled("--rdzv-conf=is_host", environ=FIRST)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--nnodes=1:2"], ("1:2", "c10d", ENDPOINT, "slurm-12.0.0", 1)),
        (["--rdzv-id=mine"], ("2", "c10d", ENDPOINT, "mine", 1)),
        (["--node-rank=0"], ("2", "c10d", ENDPOINT, "slurm-12.0.0", 0)),
        (["--rdzv-backend=static"], ("2", "static", ENDPOINT, "slurm-12.0.0", 1)),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=x:1"], ("2", "c10d", "x:1", "slurm-12.0.0", 1)),
        (["--rdzv-backend=etcd", "--rdzv-endpoint=x:1"], ("2", "etcd", "x:1", "slurm-12.0.0", 1)),
        (["--rdzv-backend=etcd"], ("2", "etcd", "", "slurm-12.0.0", 1)),
        (["--master-addr=n2"], ("2", "static", "", "slurm-12.0.0", 1)),
        (["--standalone"], ("1:1", "static", "", "none", 0)),
        (["--nnodes=1"], ("1", "static", "", "none", 0)),
    ],
)
def test_given_flags_take_precedence(flags: list[str], expected: tuple[str, str, str, str, int]) -> None:
    assert meeting(filled(*flags, environ=FIRST | {"SLURM_NODEID": "1", "SLURMD_NODENAME": "n3"})) == expected


def test_variables_of_kubeflow_trainer_take_precedence() -> None:
    trainer = INDEXED | env(
        "PET_NNODES=4 PET_NPROC_PER_NODE=8 PET_NODE_RANK=1 PET_MASTER_ADDR=train-node-0-0.train PET_MASTER_PORT=29400"
    )
    options = filled(environ=trainer, machine=POD)
    assert meeting(options) == ("4", "static", "", "k8s-train", 1)
    assert (options.master_addr, options.master_port, options.nproc_per_node) == ("train-node-0-0.train", 29400, "8")
    elastic = {"PET_NNODES": "1:4", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "job-worker-0:23456"}
    untouched = parse(["train.py"], elastic)
    done = filled(environ=elastic)
    assert done.replace(features=untouched.features, sources=untouched.sources) == untouched


@pytest.mark.parametrize(
    ("flags", "changed", "workers"),
    [
        ([], {"SLURM_GPUS_ON_NODE": "4"}, "4"),
        (["--nproc-per-node=auto"], {"SLURM_GPUS_ON_NODE": "4"}, "4"),
        (["--nproc-per-node=3"], {"SLURM_GPUS_ON_NODE": "4"}, "3"),
        ([], {"SLURM_GPUS_ON_NODE": "0", "SLURM_CPUS_PER_TASK": "1"}, "1"),
        ([], {"SLURM_CPUS_PER_TASK": "1"}, "1"),
        (["--nproc-per-node=auto"], {"SLURM_CPUS_PER_TASK": "1"}, "1"),
        (["--nproc-per-node=cpu"], {"SLURM_CPUS_PER_TASK": "1"}, "cpu"),
        ([], {"SLURM_CPUS_PER_TASK": "4000"}, str(cpu_count())),
    ],
)
def test_workers_follow_the_task(flags: list[str], changed: dict[str, str], workers: str) -> None:
    assert filled(*flags, environ={**STEP, **changed}).nproc_per_node == workers


@pytest.mark.parametrize(("seen", "workers"), [(0, "4"), (2, "2"), (8, "4")])
def test_workers_are_limited_by_the_task_s_gpus(seen: int, workers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_options, "count_accelerators", lambda environ, source: seen)
    assert filled(environ={**STEP, "SLURM_GPUS_ON_NODE": "4"}).nproc_per_node == workers


def test_a_warning_of_few_processors(caplog: pytest.LogCaptureFixture) -> None:
    for environ, words in (
        ({**FIRST, "SLURM_CPUS_PER_TASK": "4000"}, "use srun --cpus-per-task=N or --cpu-bind=none"),
        ({**STEP, "SLURM_CPUS_PER_TASK": "4000"}, ""),  # another node warns
        ({**FIRST, "SLURM_CPUS_PER_TASK": "1"}, ""),
        # Another line warns of more workers than processors.
        ({**FIRST, "SLURM_CPUS_PER_TASK": "4000", "SLURM_GPUS_ON_NODE": str(cpu_count() + 1)}, ""),
    ):
        caplog.clear()
        filled(environ=environ)
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(warnings) == bool(words)
        if words:
            assert f"may use only {cpu_count()} of 4000 processors" in warnings[0]
            assert words in warnings[0]


def test_a_pod() -> None:
    options = filled(environ=INDEXED, machine=POD)
    assert meeting(options) == ("4", "c10d", "train-0.workers.research.svc.cluster.local:29400", "k8s-train", 1)
    with pytest.raises(UsageError, match="--cluster=auto: the number of pods"):
        filled(environ={"JOB_COMPLETION_INDEX": "1"}, machine=POD)
    assert filled("--nnodes=4", environ={"JOB_COMPLETION_INDEX": "1"}, machine=POD).rdzv_endpoint.endswith(":29400")
    with pytest.raises(UsageError, match="set subdomain"):
        filled(environ=INDEXED, machine=Machine(hostname="train-1"))


def test_mpi() -> None:
    assert filled("--master-addr=n1", environ={**STEP, **OPEN_MPI}).source("nnodes") == "OMPI_COMM_WORLD_SIZE"
    silent = {name: text for name, text in OPEN_MPI.items() if name != "PMIX_NAMESPACE"}
    with pytest.raises(UsageError, match="set it with a free port: mpirun --map-by"):
        filled(environ=silent)
    options = filled("--rdzv-backend=c10d", "--rdzv-endpoint=n1:29400", environ=silent)
    assert meeting(options) == ("2", "c10d", "n1:29400", "none", 1)
    assert filled(environ={**silent, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}).nnodes == "1"


def test_insufficient_information(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        UsageError, match=r"^--cluster=auto: Slurm job 12 has 3 nodes, but this process was started wit"
    ):
        filled(environ=BATCH)
    for flags in (["--standalone"], ["--nnodes=3", "--master-addr=n1", "--node-rank=0"]):
        assert meeting(filled(*flags, environ=BATCH)) == meeting(parse([*flags, "train.py"], {}))
    with pytest.raises(
        UsageError, match=r"^PET_CLUSTER=slurm: Slurm did not start this process: SLURM_JOB_ID is not set"
    ):
        with_cluster(parse(["train.py"], {"PET_CLUSTER": "slurm"}), {}, MACHINE)


def test_a_warning_if_nothing_is_found(caplog: pytest.LogCaptureFixture) -> None:
    for environ, words in (({}, " Slurm,"), ({"SLURM_JOB_ID": "12"}, "as after ssh to one of its nodes")):
        caplog.clear()
        assert meeting(filled(environ=environ)) == ("1:1", "static", "", "none", 0)
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert words in record.getMessage()
    caplog.clear()
    filled("--nnodes=2", "--master-addr=n1", environ={})
    assert [record.levelname for record in caplog.records if record.levelno > 20] == []


def test_the_node_file_of_a_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nodes = tmp_path / "nodes"
    environ = {**PBS_TASK, "PBS_NODEFILE": str(nodes)}
    nodes.write_text(NODEFILE)
    assert this_machine(environ).job_file == NODEFILE
    nodes.write_text("n" * (2 << 20))
    assert len(this_machine(environ).job_file) == 1 << 20
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(nodes)
    os.mkfifo(pipe)
    for path in (link, pipe, tmp_path, tmp_path / "none", "", "a\0b"):
        assert this_machine({**environ, "PBS_NODEFILE": str(path)}).job_file == ""
    assert this_machine({"PBS_NODEFILE": str(nodes)}).job_file == ""  # outside a job


SEVERAL = {
    "slurm": FIRST,
    "mpi": {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"},
    "hydra": HYDRA,
    "k8s": {**INDEXED, "JOB_COMPLETION_INDEX": "0"},
    "skypilot": {**SKYPILOT, "SKYPILOT_NODE_RANK": "0"},
    "dstack": {**DSTACK, "DSTACK_NODE_RANK": "0"},
    "flux": {name: text for name, text in FLUX.items() if "PMI" not in name} | {"FLUX_TASK_RANK": "0"},
}


@pytest.mark.parametrize(
    ("flags", "warns"),
    [
        ([], "is 1, so each node runs a job of its own"),
        (["--nnodes=1"], "--nnodes is 1, so each node"),
        (["--nnodes=2"], "find only itself at 127.0.0.1"),
        (["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:1"], "find only itself at localhost"),
        (["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=[::1]:1"], "find only itself at ::1"),
        (["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=n1:1"], ""),
        (["--nnodes=2", "--master-addr=n1"], ""),
        (["--nnodes=2", "--rdzv-backend=etcd"], ""),
        (["--standalone"], ""),
    ],
)
@pytest.mark.parametrize("kind", SEVERAL)
def test_warnings_of_separate_jobs(flags: list[str], warns: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_own_worlds(parse([*flags, "train.py"], {}), SEVERAL[kind])
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == bool(warns)
    if warns:
        assert warns in found[0]
        assert "--cluster=" in found[0]


def test_only_the_first_of_several_nodes_warns(caplog: pytest.LogCaptureFixture) -> None:
    options = parse(["train.py"], {})
    others = [STEP, OPEN_MPI, {**HYDRA, "PMI_RANK": "1"}, INDEXED]
    alone = [{**FIRST, "SLURM_STEP_NUM_NODES": "1"}, {**HYDRA, "PMI_SIZE": "1"}, {**HYDRA, "MPI_LOCALNRANKS": "2"}]
    alone += [{"JOB_COMPLETION_INDEX": "0"}, {**FIRST, "TORCHELASTIC_RUN_ID": "job"}, BATCH, {}]
    odd = [{**environ, name: "x"} for environ in SEVERAL.values() for name in environ if name in _SEVERAL_NODES]
    for environ in [*others, *alone, *odd]:
        warn_of_own_worlds(options, environ)
    assert not caplog.records


def test_the_quick_check_is_complete() -> None:
    """Without these variables, `clusters` is not imported."""
    assert {launcher.size for launcher in LAUNCHERS} <= set(_SEVERAL_NODES)
    for environ, name in product(SEVERAL.values(), _SEVERAL_NODES):
        assert started_with_others(environ) is not None
        if name in environ:
            assert started_with_others({key: text for key, text in environ.items() if key != name}) is None
