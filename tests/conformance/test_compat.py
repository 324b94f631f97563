"""`rallypoint.compat` beside torch, module by module: the same names, of the same kinds, with the same signatures."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rallypoint.compat.names import MODULES, _home
from tests.drift.compare import compare, parameter_differences, parameters
from tests.drift.explained import EXPLAINED
from tests.drift.theirs import installed, read

pytestmark = pytest.mark.torch

_OVERRIDDEN = (
    "_start_workers _stop_workers _monitor_workers _shutdown _rendezvous _assign_worker_ranks _initialize_workers "
    "_restart_workers _invoke_run _exit_barrier"
)
"""What agents of third parties override."""


def module_of_torch(module: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(f"torch.{module}")


def module_of_ours(module: str) -> Any:
    if module == "distributed":
        return import_module("rallypoint.compat")
    return import_module(f"rallypoint.compat.{module.removeprefix('distributed.')}")


def test_no_name_flag_variable_or_file_differs_but_those_that_the_contract_has() -> None:
    """The report of `make drift` on the torch that is installed."""
    assert [str(line) for line in compare(read(installed())) if not line.place] == []


def test_each_explanation_is_a_row_of_the_differences_and_explains_something() -> None:
    rows = (Path(__file__).parents[2] / "docs/contract/10-differences.md").read_text()
    assert [where for where in EXPLAINED.values() if f"\n| {where} |" not in rows] == []
    met = [f"{line.fact}: {line.about}" for line in compare(read(installed()))]
    assert [each for each in EXPLAINED if not any(re.fullmatch(each, text) for text in met)] == []


@pytest.mark.parametrize("name", _OVERRIDDEN.split())
def test_methods_that_agents_of_third_parties_override(name: str) -> None:
    module = "distributed.elastic.agent.server"
    ours, theirs = (getattr(get(module).SimpleElasticAgent, name) for get in (module_of_ours, module_of_torch))
    assert parameter_differences(parameters(ours), parameters(theirs)) == []


def test_a_name_stands_for_one_thing_in_all_modules_of_torch() -> None:
    """So the table needs no module to tell which one is meant, but for those that it lists."""
    found: dict[tuple[str, str], set[int]] = {}
    for path in MODULES:
        theirs = module_of_torch(path if path.startswith("numa") else f"distributed.{path}")
        for name, thing in vars(theirs).items():
            home = _home(path, name)
            if home[0] and str(getattr(thing, "__module__", "")).startswith("torch."):
                found.setdefault(home, set()).add(id(thing))
    assert {home for home, things in found.items() if len(things) > 1} <= SAME_HERE


SAME_HERE = {
    ("rallypoint.compat.helpers", "get_socket_with_port"),
    ("rallypoint.observe.telemetry.handlers", "get_logging_handler"),
}
"""What torch has twice, and Rallypoint once."""


def test_what_is_not_ours_is_torchs() -> None:
    from_torch = {
        "elastic.multiprocessing.tail_log": "TailLog",
        "elastic.multiprocessing.subprocess_handler": "SubprocessHandler",
        "elastic.rendezvous.etcd_store": "EtcdStore",
        "elastic.rendezvous.c10d_rendezvous_backend": "construct_and_record_rdzv_event_of_nobody",
        "elastic.utils.log_level": "get_log_level",
        "argparse_util": "check_env",
        "elastic.timer.debug_info_logging": "log_debug_info_for_expired_timers",
    }
    missing = []
    for path, name in from_torch.items():
        ours, theirs = module_of_ours(path), module_of_torch(f"distributed.{path}")
        if getattr(ours, name, None) is None:
            missing.append(name)
        else:
            assert getattr(ours, name) is getattr(theirs, name)
    assert missing == ["construct_and_record_rdzv_event_of_nobody"]
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        import_module("rallypoint.compat.elastic.nothing")
    assert set(module_of_ours("elastic.events").__all__) == set(dir_of_torch("elastic.events"))


def dir_of_torch(path: str) -> list[str]:
    theirs = module_of_torch(f"distributed.{path}")
    return getattr(theirs, "__all__", [name for name in vars(theirs) if not name.startswith("_")])


def test_the_registry_has_torchs_name() -> None:
    registry = module_of_ours("distributed.elastic.rendezvous.registry").handler_registry
    assert registry is module_of_ours("distributed.elastic.rendezvous").rendezvous_handler_registry


def test_rallypoint_itself_does_without() -> None:
    program = "import sys, rallypoint.agent.launch, rallypoint.cli.rallyrun\nprint('rallypoint.compat' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"
