"""`--preflight`: the checks of this node, before it joins. Imported only where they are asked for."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.base.log import get_logger
from rallypoint.preflight.admission import admit
from rallypoint.preflight.results import counts
from rallypoint.preflight.run import run_checks
from rallypoint.preflight.table import CheckInputs

if TYPE_CHECKING:
    from rallypoint.launch.config import LaunchConfig
    from rallypoint.rendezvous.params import RendezvousParameters

_log = get_logger(__name__)


def check_node(config: LaunchConfig, parameters: RendezvousParameters) -> None:
    """Run all checks, and log what they have found.

    Raises:
        PreflightError: something has failed, and `config.preflight` requires that nothing does.
    """
    assert config.logs_specs is not None
    begun = SYSTEM_CLOCK.monotonic()
    results = run_checks(
        CheckInputs(
            tempfile.gettempdir(),
            str(config.logs_specs.root_log_dir or ""),
            parameters.endpoint,
            parameters.backend,
            parameters.run_id,
            config.nproc_per_node,
        )
    )
    _log.info("preflight checks of this node: %s, in %.2f s", counts(results), SYSTEM_CLOCK.monotonic() - begun)
    admit(results, config.preflight)
