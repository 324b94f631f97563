"""Impossible values, and options that `--standalone` overrides."""

from __future__ import annotations

import logging

import pytest

from rallypoint.agent.launch import LaunchConfig
from rallypoint.base.errors import UsageError
from rallypoint.cli.convert import config_from_options
from rallypoint.cli.parse import parse

MEETING = ("--rdzv-backend=c10d", "--rdzv-endpoint=node0:29400", "--rdzv-id=job")


def launched(*arguments: str, **environ: str) -> LaunchConfig:
    return config_from_options(parse([*arguments, "s.py"], environ), environ)[0]


@pytest.mark.parametrize("text", ["$SLURM_JOB_ID", "job-${X}", "$(JOB_NAME)-a", "${X:-1}", "`hostname`"])
@pytest.mark.parametrize("flag", ["--rdzv-id", "--rdzv-endpoint", "--log-dir", "--incident-dir", "--local-addr"])
def test_unexpanded_variables(flag: str, text: str) -> None:
    with pytest.raises(UsageError, match=flag) as refused:
        launched(*MEETING, f"{flag}={text}")
    assert repr(text) in str(refused.value)


def test_unexpanded_variables_of_other_sources() -> None:
    with pytest.raises(UsageError, match=r"PET_RDZV_ID='\$\(JOB\)' contains \$\(JOB\), which was not expanded"):
        launched(PET_NNODES="2", PET_RDZV_ID="$(JOB)")
    with pytest.raises(UsageError, match="PET_LOG_DIR"):
        launched(PET_LOG_DIR="/logs/$USER")
    with pytest.raises(UsageError, match=r"--nnodes='\$SLURM_NNODES' contains \$SLURM_NNODES"):
        launched("--nnodes=$SLURM_NNODES")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--log-line-prefix-template=[${rank}]: "],
        ["--node-check=test -n $HOME"],
        ["--duplicate-stdout-filters=$HOME"],
        ["--rdzv-id=5$"],
        ["--rdzv-id=a$-b"],
        ["--rdzv-conf=user=u,password=pa$word"],
    ],
)
def test_allowed_dollars(arguments: list[str]) -> None:
    launched(*MEETING, *arguments)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rdzv-id="], "--rdzv-id is empty"),
        (["--rdzv-id= "], "--rdzv-id is empty"),
        (["--rdzv-endpoint="], "--rdzv-endpoint is empty"),
        (["--rdzv-backend=static", "--rdzv-endpoint="], "--rdzv-endpoint is empty"),
    ],
)
def test_empty_values_with_several_nodes(flags: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        launched(*MEETING, "--nnodes=1:2", *flags)
    launched(*MEETING, *flags)
    assert launched("--nnodes=2", "--rdzv-endpoint=", "--master-addr=node0").rdzv_endpoint == "node0:29500"
    with pytest.raises(UsageError, match="PET_RDZV_ID is empty"):
        launched(*MEETING[:2], PET_NNODES="2", PET_RDZV_ID="")


# --standalone


@pytest.mark.parametrize(
    ("flags", "environ"), [(["--standalone", "--nnodes=2"], {}), (["--nnodes=2"], {"PET_STANDALONE": "1"})]
)
def test_standalone_with_more_nodes_is_refused(flags: list[str], environ: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"--nnodes=2 needs 2 nodes, but (--standalone|PET_STANDALONE) runs"):
        launched(*flags, **environ)
    with pytest.raises(UsageError, match="--segment=2"):
        launched("--standalone", "--segment=2", PET_NNODES="4")


@pytest.mark.parametrize(
    ("flags", "environ", "named"),
    [
        (["--standalone"], {"PET_NNODES": "2"}, "PET_NNODES=2 has"),
        (["--standalone"], {"PET_NNODES": "2", "PET_SEGMENT": "2"}, "PET_NNODES=2, PET_SEGMENT=2 has"),
        (["--standalone", "--nnodes=1:4"], {}, "--nnodes=1:4 has"),
        ([], {"PET_STANDALONE": "1", "PET_NNODES": "3"}, "PET_NNODES=3 has"),
        (
            ["--standalone", "--rdzv-endpoint=h:1", "--rdzv-id=x", "--master-addr=h"],
            {"PET_NODE_RANK": "3"},
            "--rdzv-endpoint=h:1, --rdzv-id=x, PET_NODE_RANK=3, --master-addr=h has",
        ),
        (["--standalone", "--rdzv-backend=etcd"], {}, "--rdzv-backend=etcd has"),
    ],
)
def test_standalone_wins(
    flags: list[str], environ: dict[str, str], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = launched(*flags, **environ)
    assert (config.min_nodes, config.max_nodes, config.rdzv_endpoint) == (1, 1, "localhost:0")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"runs the job on this node only, so {named} no effect" in record.getMessage()


@pytest.mark.parametrize(
    "flags", [[], ["--nnodes=1"], ["--nnodes=1:1", "--rdzv-backend=c10d"], ["--rdzv-endpoint=localhost:0"]]
)
def test_standalone_with_options_that_agree(flags: list[str], caplog: pytest.LogCaptureFixture) -> None:
    launched("--standalone", *flags)
    assert not caplog.records


def test_requeue_outside_slurm() -> None:
    with pytest.raises(UsageError, match=r"PET_REQUEUE=3 requeues a Slurm job, but this is not one"):
        launched("--preempt-signals=SIGUSR2", PET_REQUEUE="3")
    with pytest.raises(UsageError, match=r"this is one of LSF; remove the flag, and submit with bsub -Q 143"):
        launched("--preempt-signals=SIGUSR2", PET_REQUEUE="3", LSB_JOBID="7")
    with pytest.raises(UsageError, match=r"this is one of PBS, where only an operator may requeue a job"):
        launched("--preempt-signals=SIGUSR2", PET_REQUEUE="3", PBS_JOBID="7.server")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train.py", "--nproc-per-node=2"], "--nproc-per-node=2"),
        (["train.py", "--epochs=3", "--rdzv_id", "x"], "--rdzv_id"),
        (["train.py", "--nproc=2", "--log-dir=logs"], ""),
        (["--no-python", "torchrun", "--standalone", "train.py"], ""),
    ],
)
def test_a_warning_of_flags_after_the_script(words: list[str], named: str, caplog: pytest.LogCaptureFixture) -> None:
    config_from_options(parse(words, {}), {})
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(" ")[0] for line in lines] == ([named] if named else [])
    assert all("put it before train.py" in line for line in lines)
