"""The domain of a node (`--node-domain`). With it, the coordinator keeps well-connected nodes together, in segments of
a set size (`--segment`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rallypoint.agent.feature import Agent, Feature
from rallypoint.clusters.topology import node_domain

if TYPE_CHECKING:
    from rallypoint.agent.launch import LaunchConfig
    from rallypoint.control.membership.state import NodeInfo
    from rallypoint.rendezvous.params import RendezvousParameters


def add_segment(config: LaunchConfig, parameters: RendezvousParameters) -> None:
    """Pass the segment size to the rendezvous, overriding `--rdzv-conf`."""
    if config.features.topology.segment != 1:
        parameters.config["segment"] = config.features.topology.segment


class Topology(Feature):
    """The domain of one node, determined once."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._domain = node_domain(self.workers.group.spec.features.topology.node_domain)

    def node_info(self, info: NodeInfo) -> NodeInfo:
        return info._replace(domain=self._domain)
