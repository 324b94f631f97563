"""Shows equal teed lines of several ranks once (`--tee-collapse`)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rallypoint.agent.feature import Feature
from rallypoint.features.collapse.merging import CollapsingSink

if TYPE_CHECKING:
    from rallypoint.workers.context import ProcessOptions


class Collapse(Feature):
    """Collapses the outputs of one agent's workers."""

    def process_options(self, options: ProcessOptions) -> ProcessOptions:
        seconds = self.workers.group.spec.features.output.tee_collapse
        return options._replace(merges=partial(CollapsingSink, seconds))
