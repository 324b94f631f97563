"""The verb `drill`: injects faults into a running job, and measures how long each recovery takes."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time

from rallypoint.base.errors import RallypointError, UsageError
from rallypoint.cli.exit import print_answer, print_error
from rallypoint.cli.job_verbs import receive, require_job, with_session
from rallypoint.control.protocol.messages import Fault
from rallypoint.control.protocol.ranges import is_in_range, range_of
from rallypoint.observe.drills import (
    Begun,
    Drill,
    DrillRefused,
    Trial,
    choose,
    drill_fields,
    is_passed,
    is_settled,
    outcome,
    sentence,
    trial_lines,
)
from rallypoint.observe.watching.client import UnreachableError, WatcherSession, operator_name, with_all_nodes
from rallypoint.observe.watching.messages import CommandReply, FaultCommand, Snapshot, WatchRequest

NOT_SURVIVED = 4
"""Exit code if the job did not survive a fault; 1 if a fault was refused."""
_LOOK_EVERY = 0.5
"""Seconds between two queries of the job. Events carry their own times, so this does not limit precision."""
_KILLS = {"worker": Fault.KILL_WORKER, "agent": Fault.KILL_AGENT, "node": Fault.KILL_NODE}


def drill(options: argparse.Namespace) -> int:
    plan = _parse_drill(options)
    require_job(options)

    async def run(session: WatcherSession) -> int:
        run = _DrillRun(session, plan, options.every)
        try:
            await run.all_trials()
        except (UnreachableError, KeyboardInterrupt, asyncio.CancelledError) as error:
            run.stopped = str(error) or "interrupted"
        return run.show(as_json=options.json)

    return with_session(options, run)


def _parse_drill(options: argparse.Namespace) -> Drill:
    faults = [name for name in ("kill", "pause", "hang", "cut") if getattr(options, name)]
    if len(faults) != 1:
        raise UsageError("choose exactly one fault: --kill, --pause, --hang or --cut")
    if options.node and options.rank >= 0:
        raise UsageError("--rank and --node cannot be combined; use one of them")
    fault, lasts = _fault(options)
    if fault.is_of_worker and options.node:
        raise UsageError(f"'{fault.value}' affects a worker; choose one with --rank")
    if not fault.is_of_worker and options.rank >= 0:
        raise UsageError(f"'{fault.value}' affects a node; choose one with --node")
    for name in ("times", "every", "within"):
        value = getattr(options, name)
        if not 0 < value < math.inf:  # nan fails too
            raise UsageError(f"--{name}={value:g} is out of range; set it to more than 0")
    if not is_in_range("lasts", lasts):
        raise UsageError(f"a fault cannot last {lasts:g} s; use 0 to {range_of('lasts').maximum:g}")
    return Drill(
        fault, options.times, options.seed, options.rank, options.node, lasts, options.within, forced=options.force
    )


def _fault(options: argparse.Namespace) -> tuple[Fault, float]:
    if options.kill:
        return _KILLS[options.kill], 0.0
    if options.hang:
        return Fault.HANG, options.within
    if options.cut:
        return Fault.CUT, options.cut
    return Fault.PAUSE_NODE if options.node else Fault.PAUSE_WORKER, options.pause


class _DrillRun:
    """One drill, in a session with the job's coordinator."""

    def __init__(self, session: WatcherSession, drill: Drill, every: float) -> None:
        self._session = session
        self._drill = drill
        self._every = every
        self._trials: list[Trial] = []
        self._job = ""
        self.stopped = ""
        """Why the drill stopped before all faults."""

    async def all_trials(self) -> None:
        due = time.monotonic()
        for number in range(1, self._drill.times + 1):
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due = time.monotonic() + self._every
            try:
                begun = await self._begin(number)
            except DrillRefused as refused:
                self.stopped = str(refused)
                return
            print_error(f"rallyctl: {number} of {self._drill.times}: {begun.text}")
            self._trials.append(await self._end_of(begun))
            if not self._trials[-1].survived or self._trials[-1].note:
                self.stopped = "" if number == self._drill.times else self._trials[-1].note
                return

    async def _begin(self, number: int) -> Begun:
        """Inject one fault. Raises DrillRefused if it is refused."""
        before = await self._wait_until_settled()
        drill, victim = self._drill, choose(self._drill, number, before)
        self._session.send(FaultCommand(operator_name(), drill.fault, victim.rank, victim.key, drill.lasts))
        reply = await receive(self._session, CommandReply)
        if not reply.done:
            raise DrillRefused(reply.detail)
        return Begun(drill, number, victim, reply.detail, before)

    async def _wait_until_settled(self) -> Snapshot:
        """The state of the job after it recovered completely or ended."""
        until = time.monotonic() + self._drill.within
        while not (seen := await self._snapshot()).detail and not is_settled(seen):
            if time.monotonic() > until:
                raise DrillRefused(f"some nodes have not reported a training step for {self._drill.within:g} s")
            await asyncio.sleep(_LOOK_EVERY)
        return seen

    async def _end_of(self, begun: Begun) -> Trial:
        try:
            while True:
                await asyncio.sleep(_LOOK_EVERY)
                if (done := outcome(begun, await self._snapshot())) is not None:
                    return done
        except UnreachableError as error:  # the control plane might have ended with the job
            return Trial(begun.number, begun.drill.fault, begun.victim, note=str(error))

    async def _snapshot(self) -> Snapshot:
        self._session.send(WatchRequest())
        seen = await receive(self._session, Snapshot)
        self._job = seen.job
        return await with_all_nodes(seen, self._session.snapshot)

    def show(self, *, as_json: bool) -> int:
        trials, stopped = self._trials, self.stopped
        if not trials and not as_json:
            raise RallypointError(stopped)
        if as_json:
            print_answer(json.dumps(drill_fields(self._drill, self._job, trials, stopped), indent=2))
        else:
            print_answer("\n".join([*trial_lines(trials), "", sentence(trials, stopped)]))
        if all(trial.survived for trial in trials):
            return 0 if is_passed(self._drill, trials) else 1
        return NOT_SURVIVED
