"""The mesh of `--preflight`: the nodes dial each other before the job's first workers start."""

from __future__ import annotations

from rallypoint.agent.feature import Agent, Feature
from rallypoint.agent.round_setup import exchange_of
from rallypoint.base.errors import UserError
from rallypoint.base.log import get_logger
from rallypoint.clusters.preflight.results import REQUIRE

log = get_logger(__name__)


class Mesh(Feature):
    """Has one agent dial the others. If that is required and impossible, the agent does not start."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        mode = self.workers.group.spec.features.checks.preflight
        try:
            exchange_of(self.workers, self.workers.max_nodes, "--preflight").mesh = mode
        except UserError as error:
            if mode == REQUIRE:
                raise
            log.warning("the nodes do not dial each other: %s", error)
