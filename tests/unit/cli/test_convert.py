from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from rallypoint.base.errors import UserError
from rallypoint.cli.convert import EntryPoint, config_from_options, limit_threads
from rallypoint.cli.parse import parse
from rallypoint.launch.config import LaunchConfig
from rallypoint.logs.specs import DefaultLogsSpecs, LogsDest


@pytest.fixture(autouse=True)
def _no_timeout_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)


def _convert(*arguments: str, **environ: str) -> tuple[LaunchConfig, EntryPoint, tuple[str, ...]]:
    return config_from_options(parse(arguments, environ), environ)


def _destinations(config: LaunchConfig, workers: int) -> LogsDest:
    assert isinstance(config.logs_specs, DefaultLogsSpecs)
    return config.logs_specs.reify({rank: {} for rank in range(workers)})


def test_defaults() -> None:
    config, program, arguments = _convert("s.py", "a")
    assert (program, arguments) == (sys.executable, ("-u", "s.py", "a"))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (1, 1, 1)
    assert (config.role, config.max_restarts, config.shutdown_timeout) == ("default", 0, 30)
    assert config.rdzv_configs == {"timeout": 900}
    assert config.log_line_prefix_template is None


def test_everything_arrives() -> None:
    config, _, _ = _convert(
        "--nnodes=1:4",
        "--nproc-per-node=3",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=h:1",
        "--rdzv-id=job",
        "--rdzv-conf=join_timeout=5",
        "--max-restarts=2",
        "--monitor-interval=0.5",
        "--start-method=fork",
        "--role=trainer",
        "--node-rank=2",
        "--local-addr=me",
        "--signals-to-handle=SIGTERM, SIGUSR1",
        "--shutdown-timeout=0",
        "s.py",
        TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="[${rank}] ",
    )
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (1, 4, 3)
    assert (config.rdzv_backend, config.rdzv_endpoint, config.run_id) == ("c10d", "h:1", "job")
    assert config.rdzv_configs == {"join_timeout": "5", "timeout": 900}
    assert (config.max_restarts, config.monitor_interval, config.start_method) == (2, 0.5, "fork")
    assert (config.role, config.node_rank, config.local_addr) == ("trainer", 2, "me")
    assert (config.signals_to_handle, config.shutdown_timeout) == ("SIGTERM, SIGUSR1", 0)
    assert config.log_line_prefix_template == "[${rank}] "


@pytest.mark.parametrize(
    ("flags", "environ", "program", "arguments"),
    [
        (["-m"], {}, sys.executable, ("-u", "-m", "s.py", "--x")),
        (["--no-python"], {"PYTHON_EXEC": "py"}, "s.py", ("--x",)),
        ([], {"PYTHON_EXEC": "py"}, "py", ("-u", "s.py", "--x")),
        ([], {"PYTHON_EXEC": ""}, "", ("-u", "s.py", "--x")),
    ],
)
def test_entry_points(flags: list[str], environ: dict[str, str], program: str, arguments: tuple[str, ...]) -> None:
    assert _convert(*flags, "s.py", "--x", **environ)[1:] == (program, arguments)


def test_streams_and_ranks_shown(tmp_path_factory: pytest.TempPathFactory) -> None:
    logs = str(tmp_path_factory.mktemp("logs"))
    config, _, _ = _convert(
        "--nproc-per-node=3", f"--log-dir={logs}", "-r", "1:2", "-t", "0:1", "--local-ranks-filter=0, 1", "s.py"
    )
    assert config.logs_specs is not None
    assert config.logs_specs.root_log_dir == logs
    found = _destinations(config, 3)
    assert found.stdouts[0].endswith("/0/stdout.log")
    assert found.tee_stdouts == {0: found.stdouts[0]}
    assert (found.stdouts[1], found.stderrs[1][-13:]) == ("", "/1/stderr.log")
    assert (found.stdouts[2], found.stderrs[2]) == ("/dev/null", "/dev/null")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nnodes=a"], "--nnodes='a'"),
        (["--nproc-per-node=0"], "--nproc-per-node='0'"),
        (["--max-restarts=-1"], "--max-restarts=-1 .* 0 or more"),
        (["--monitor-interval=0"], "--monitor-interval=0.0 .* above 0"),
        (["--monitor-interval=nan"], "--monitor-interval=nan"),
        (["--shutdown-timeout=-1"], "--shutdown-timeout=-1"),
        (["--local-ranks-filter=a"], "--local-ranks-filter='a'"),
        (["--local-ranks-filter=0,"], "--local-ranks-filter='0,'"),
        (["-r", "4"], "--redirects: '4'"),
        (["-r", ""], "--redirects: ''"),
        (["-t", "10:1"], "--tee: '10:1'"),
        (["--log-dir", __file__], "--log-dir"),
        (["--rdzv-conf=foo"], "--rdzv-conf: .*'foo'"),
        (["--no-python", "-m"], "--no-python .* --module"),
        (["--signals-to-handle=SIGTERM,SIGKILL"], "--signals-to-handle names SIGKILL"),
        (["--logs-specs=mine"], "--logs-specs=mine: .*'mine'; use one of default"),
        (["--logs-specs="], "--logs-specs=: .*''; use one of default"),
        (
            ["--event-log-handler=x"],
            "--event-log-handler: no .* the event handler 'x'; use one of console",
        ),
        (["--log-dir=/dev/null", "--duplicate-stdout-filters=a"], "--duplicate-stdout-filters .* --log-dir=/dev/null"),
    ],
)
def test_bad_values_are_named(arguments: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        _convert(*arguments, "s.py")


@pytest.mark.parametrize(
    ("arguments", "environ", "said"),
    [
        (["--virtual-local-rank", "--nproc-per-node=2"], {"CUDA_VISIBLE_DEVICES": "3"}, "--virtual-local-rank: .*'3'"),
        (["--numa-binding=node"], {"CUDA_VISIBLE_DEVICES": ""}, "--numa-binding=node: .* CUDA_VISIBLE_DEVICES=''"),
    ],
)
def test_devices_that_are_missing_are_named(arguments: list[str], environ: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        _convert(*arguments, "s.py", **environ)


def test_what_is_about_devices_and_output_arrives() -> None:
    config, _, _ = _convert(
        "--virtual-local-rank",
        "--duplicate-stdout-filters=a,,b,c",
        "--duplicate-stderr-filters=d",
        "--event-log-handler=console",
        "--logs-specs=default",
        "s.py",
    )
    assert (config.virtual_local_rank, config.event_log_handler, config.numa_options) == (True, "console", None)
    assert (config.duplicate_stdout_filters, config.duplicate_stderr_filters) == (["a,b", "c"], ["d"])
    assert isinstance(config.logs_specs, DefaultLogsSpecs)


def test_a_bad_value_from_the_environment_is_named_by_its_variable() -> None:
    with pytest.raises(UserError, match="PET_MAX_RESTARTS=-1"):
        _convert("s.py", PET_MAX_RESTARTS="-1")
    with pytest.raises(UserError, match="PET_TEE: 'x'"):
        _convert("s.py", PET_TEE="x")


def test_the_progress_file_is_where_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _convert("--progress-file=step", "train.py")[0].progress_file == str(tmp_path / "step")


def test_unknown_signals_are_skipped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config, _, _ = _convert("--signals-to-handle=SIGTERM,SIGFOO, SIGUSR1", "s.py")
    assert config.signals_to_handle == "SIGTERM,SIGFOO, SIGUSR1"
    assert [(record.levelno, "'SIGFOO'" in record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, True)
    ]


@pytest.mark.parametrize(
    ("workers", "environ", "after"),
    [
        (2, {}, {"OMP_NUM_THREADS": "1"}),
        (1, {}, {}),
        (2, {"OMP_NUM_THREADS": "4"}, {"OMP_NUM_THREADS": "4"}),
        (2, {"OMP_NUM_THREADS": ""}, {"OMP_NUM_THREADS": ""}),
    ],
)
def test_threads(
    workers: int, environ: dict[str, str], after: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    changed = environ != after
    limit_threads(LaunchConfig(1, 1, workers), environ)
    assert environ == after
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * changed


@pytest.mark.parametrize("more", [[], ["--no-python"], ["--no-python", "--module"]])
def test_run_path_is_a_function_and_wins(more: list[str]) -> None:
    from rallypoint.workers.functions.worker import run_script_path

    _, function, arguments = _convert(*more, "--run-path", "s.py", "-x", "${local_rank}")
    assert function is run_script_path
    assert arguments == ("s.py", "-x", "${local_rank}")
