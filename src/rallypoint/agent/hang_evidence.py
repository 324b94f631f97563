"""Collects the evidence of a hang from the workers of this node, as its agent's loop knows them."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rallypoint.agent.policy_hang import OnHang
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.hangs.dumps import recorder_of
from rallypoint.hangs.evidence import ExaminedNode, ExaminedWorker, collect_evidence
from rallypoint.hangs.messages import encode_evidence

if TYPE_CHECKING:
    from rallypoint.agent.controller import WorkerController
    from rallypoint.workers.context import PContext


def examined_node(controller: WorkerController) -> ExaminedNode:
    """This node and its workers at this moment. On the loop's thread."""
    group, context = controller.group, controller.pcontext
    host = os.uname().nodename
    if context is None:
        return ExaminedNode(host, ())
    pids, exit_codes = context.pids(), context.exit_codes
    workers = tuple(
        ExaminedWorker(
            each.global_rank,
            pids.get(each.local_rank, 0),
            exit_codes.get(each.local_rank),
            recorder_of(each.global_rank, {**os.environ, **context.envs[each.local_rank]}),
        )
        for each in group.workers
    )
    ends_them = controller.group.spec.features.hangs.reaction in (OnHang.RESTART, OnHang.FAIL)
    return ExaminedNode(host, workers, attempt_folder(context), ends_them)


def collect(node: ExaminedNode, context: PContext | None, local_ranks: Mapping[int, int]) -> bytes:
    """The evidence of this node, encoded. A worker whose stacks cannot be read writes them when it is ended, if all
    will be.

    Args:
        node: the result of `examined_node`.
        context: the node's workers.
        local_ranks: by global rank.
    """
    evidence = collect_evidence(node)
    if context is not None and node.ends_workers:
        unread = (each.rank for each in evidence.ranks if each.why_none)
        context.without_stacks.update(local_ranks[rank] for rank in unread)
    return encode_evidence(evidence)


def attempt_folder(context: PContext) -> str:
    """The folder of this start of the workers; empty if their output has none."""
    path = next((each for each in context.error_files.values() if each), "")
    return os.path.dirname(os.path.dirname(path))
