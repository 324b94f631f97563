"""The launcher as functions, where their names or signatures are torch's."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

import rallypoint.compat
from rallypoint.base.errors import UserError
from rallypoint.compat import launch, run
from rallypoint.compat.helpers import parse_rendezvous_endpoint
from rallypoint.failures.report import ChildFailedError


def test_a_value_that_was_changed_by_hand_counts() -> None:
    args = run.parse_args(["--nnodes=1", "--nproc-per-node=1", "--master-port=7", "x.py"])
    args.nproc_per_node = "3"
    args.role = "mine"
    args.training_script_args = ["a"]
    config, _program, arguments = run.config_from_args(args)
    assert (config.nproc_per_node, config.role) == (3, "mine")
    assert arguments[-1] == "a"


def test_a_namespace_of_a_parser_with_more_flags() -> None:
    parser = run.get_args_parser()
    parser.add_argument("--mine")
    args = parser.parse_args(["--mine=1", "--nnodes=2", "--node-rank=1", "--master-port=7", "x.py", "--log-dir", "a"])
    config, _program, arguments = run.config_from_args(args)
    assert (config.rdzv_backend, config.rdzv_configs["rank"], config.max_nodes) == ("static", 1, 2)
    assert arguments[-3:] == ["x.py", "--log-dir", "a"]


def test_a_bad_value_names_its_flag() -> None:
    with pytest.raises(UserError, match="--nnodes"):
        run.config_from_args(run.parse_args(["--nnodes=a", "x.py"]))


def test_a_usage_error_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        run.main(["--nnodes=1"])
    assert ending.value.code == 2
    assert "training_script" in capsys.readouterr().err


@pytest.mark.process
def test_a_failure_goes_on_to_the_caller(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(4)")
    with pytest.raises(ChildFailedError) as failed:
        run.main(["--standalone", f"--log-dir={tmp_path}", str(script)])
    assert failed.value.get_first_failure()[1].exitcode == 4


def test_the_old_launcher_warns_and_wants_the_environment_for_programs() -> None:
    with pytest.warns(FutureWarning, match="deprecated"), pytest.raises(UserError, match="--use-env"):
        launch.main(["--no-python", "prog"])
    assert launch.parse_args(["--use_env", "x.py"]).use_env is True
    assert run.get_use_env(argparse.Namespace()) is True


def test_an_endpoint_of_static_may_be_in_two_flags() -> None:
    assert run.get_rdzv_endpoint(run.parse_args(["--master-addr=h", "--master-port=7", "x.py"])) == "h:7"
    assert run.get_rdzv_endpoint(run.parse_args(["--rdzv-endpoint=e:1", "x.py"])) == "e:1"
    assert parse_rendezvous_endpoint("h:1", 2) == ("h", 1)
    assert parse_rendezvous_endpoint("", 2) == ("localhost", 2)


def test_stores_are_there() -> None:
    assert all(isinstance(getattr(rallypoint.compat, name), type) for name in rallypoint.compat.__all__)


@pytest.mark.parametrize("argv", [[None, "train.py"], [], ["", "train.py"]], ids=str)
def test_a_program_without_a_name_has_the_parser_too(monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> None:
    """An embedding program need not set `sys.argv`. (torch raises a TypeError and an IndexError.)"""
    monkeypatch.setattr(sys, "argv", argv)
    assert run.get_args_parser().parse_args(["train.py", "1"]).training_script_args == ["1"]
    assert run.parse_args(["--nnodes=2", "train.py"]).nnodes == "2"
    if argv:
        assert run.parse_args(None).training_script == "train.py"
