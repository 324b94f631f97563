"""Checks this node before it joins (`--preflight`). Imported only on request."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.base.endpoint import Endpoint, parse_endpoint
from rallypoint.base.errors import UserError
from rallypoint.base.log import get_logger
from rallypoint.clusters.preflight.results import REQUIRE, WARN, CheckInputs, admit, counts
from rallypoint.clusters.preflight.run import LOG_SPACE, run_checks
from rallypoint.rendezvous.coordinators import coordinators
from rallypoint.rendezvous.params import BACKENDS, ON_ETCD

if TYPE_CHECKING:
    from rallypoint.agent.launch import LaunchConfig
    from rallypoint.rendezvous.params import RendezvousParameters

_log = get_logger(__name__)


def check_node(mode: str, log_dir: str, workers: int, parameters: RendezvousParameters) -> None:
    """Run all checks, and log the results.

    Args:
        mode: `WARN` or `REQUIRE`.
        log_dir: see `inputs_of`.
        workers: the number of workers of this node.
        parameters: the rendezvous parameters.

    Raises:
        PreflightError: a check failed, and `--preflight` requires that all pass.
        UserError: `--preflight` is not a known mode.
    """
    if mode not in (WARN, REQUIRE):
        raise UserError(f"preflight={mode!r} is neither {WARN} nor {REQUIRE}; use one of them, or nothing")
    begun = SYSTEM_CLOCK.monotonic()
    inputs = inputs_of(parameters, log_dir)._replace(workers=workers, max_nodes=parameters.max_nodes, joins=True)
    results = run_checks(inputs)
    _log.info("preflight checks of this node: %s, in %.2f s", counts(results), SYSTEM_CLOCK.monotonic() - begun)
    admit(results, mode)


def admit_node(config: LaunchConfig, parameters: RendezvousParameters) -> None:
    """Check this node before it joins. Raises like `check_node`."""
    log_dir = "" if config.logs_specs is None else str(config.logs_specs.root_log_dir or "")
    check_node(config.features.checks.preflight, log_dir, config.nproc_per_node, parameters)


def await_log_dir(log_dir: str, mode: str) -> None:
    """Check that the folder responds, before a call that could block forever.

    Raises:
        PreflightError: the folder does not respond, and `mode` requires it.
    """
    results = run_checks(CheckInputs(log_dir), checks=(LOG_SPACE,))
    if results == LOG_SPACE.for_all_names(LOG_SPACE.silence):
        admit(results, mode)


def inputs_of(parameters: RendezvousParameters, log_dir: str) -> CheckInputs:
    """Collect the checks' inputs for this rendezvous; `log_dir` is empty if logs go to the temporary folder.

    Raises:
        UserError: the endpoint or an option of the backend cannot work.
    """
    places = [endpoint for endpoint in _endpoints(parameters) if endpoint.port]  # without a port, no other node joins
    ask = partial(coordinators, parameters) if places and parameters.backend in BACKENDS else None
    return CheckInputs(log_dir, tuple(places), parameters.backend, parameters.run_id, coordinators=ask)


def _endpoints(parameters: RendezvousParameters) -> list[Endpoint]:
    if parameters.backend in ON_ETCD:
        from rallypoint.rendezvous.backends.etcd import endpoints_of

        return endpoints_of(parameters.endpoint)
    in_file = str(parameters.get("store_type", "tcp")).strip().lower() == "file"
    if in_file or parameters.backend not in BACKENDS:
        return []
    return [parse_endpoint(parameters.endpoint, BACKENDS[parameters.backend].port)]
