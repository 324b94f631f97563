"""From a loss to the next finished training step, with `examples/train_ddp.py`: what a failure costs a job.

Each turn is a whole job that has trained some steps, then loses a worker or a node by SIGKILL. What counts is the first
step that is finished in the new round, as it is told on the launcher's standard output. Then the same with a model
whose construction takes 5 s, which each new process builds. A job that has not come back when the time is over never
resumes; those are counted.

`ten-kills` is one job per side that loses a worker ten times: a transformer (`programs/transformer.py`), whose loss
must be that of a job in which nothing happens.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.case import THEIRS, BenchError, Budget, Case, Row, Settings, Turns, in_turn, sample
from benchmarks.children import ROOT, Child, Children, descendants, launcher
from benchmarks.jobs import free_port
from benchmarks.preload import is_zygote
from benchmarks.system import ProcessClock

_EVENT = re.compile(r'\{"event": [^{}]*\}')
_START_TIMEOUT = 180.0
"""Seconds for the first steps, and for what is preloaded."""
_RESUME_TIMEOUT = 120.0
"""Seconds for the next step: torchrun's last call takes 30 of them, then workers import torch."""
_RESUME_TIMEOUT_QUICK = 20.0
_STEPS = 20
"""Steps before the loss: one checkpoint is there then."""
_CALM = 1.0
"""Seconds in which all but workers and agents use less than a tenth of a processor: nothing is being prepared then."""
_CONSTRUCTION = 5.0


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the job, with the budgets of its ratio to torchrun."""

    name: str
    command: str = "rallyrun"
    flags: tuple[str, ...] = ()
    program: str = "examples/train_ddp.py"
    arguments: tuple[str, ...] = ()
    ready: str = ""
    """What each agent writes to standard error when it has preloaded, where its workers do not wait for that."""
    budget: Budget | None = None
    budget_construction: Budget | None = None

    @property
    def preloads(self) -> bool:
        """Whether each of its agents has a zygote."""
        return any(flag.startswith("--preload") for flag in self.flags)

    @property
    def standby(self) -> bool:
        """Whether each of its agents has a standby worker."""
        return "--standby=1" in self.flags


TORCHRUN = Variant(THEIRS, "torchrun")
PRELOAD = "--preload=torch,torch._dynamo"
VARIANTS = (
    Variant("rallyrun"),
    Variant(f"rallyrun {PRELOAD}", flags=(PRELOAD,), budget=Budget(0.035)),
    Variant(
        "rallyrun --preload=auto",
        flags=("--preload=auto",),
        ready="Preloaded for restarted workers",
        budget=Budget(0.035),
    ),
    Variant(
        "rallyrun, in-process",
        flags=(PRELOAD,),
        program="examples/train_ddp_inprocess.py",
        budget=Budget(0.03),
    ),
    Variant(
        "rallyrun, in-process --standby=1",
        flags=("--standby=1",),
        program="examples/train_ddp_inprocess.py",
        ready="a standby worker is ready",
        budget=Budget(0.03),
        budget_construction=Budget(0.02),
    ),
)
"""Ours; what each is compared with is torchrun in the same round."""


@dataclass(frozen=True, slots=True)
class Place:
    """Nodes, the fewest that do, workers of each, and further nodes that wait for a place."""

    nodes: int
    least: int
    workers: int
    spares: int = 0


class Job:
    """One job of the example; `pids` are its workers' by global rank, as they last said."""

    def __init__(
        self, variant: Variant, place: Place, construction: float, env: Mapping[str, str] | None = None
    ) -> None:
        self._variant = variant
        self._env = env
        self.pids: dict[int, int] = {}
        self.losses = 0
        """How many workers were killed; as many standby workers have taken their places."""
        with ExitStack() as undo:
            folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="rallybench-"))
            self.children = undo.enter_context(Children())
            program = [
                str(ROOT / variant.program),
                *variant.arguments,
                "--steps=1000000",
                "--progress=/dev/stdout",
                f"--checkpoint-dir={folder}",
                *([f"--construction-seconds={construction:g}"] if construction else []),
            ]
            endpoint = f"127.0.0.1:{free_port()}"
            self.agents = [
                self._start(place, number, endpoint, program) for number in range(place.nodes + place.spares)
            ]
            self._undo = undo.pop_all()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _start(self, place: Place, number: int, endpoint: str, program: list[str]) -> Child:
        meet = [
            f"--nnodes={place.least}:{place.nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={endpoint}",
            f"--rdzv-conf=is_host={str(number == 0).lower()}",
            "--rdzv-id=bench",
        ]
        where = ["--standalone"] if place.nodes == 1 else meet
        count = [f"--nproc-per-node={place.workers}", "--max-restarts=20"]
        argv = [launcher(self._variant.command), *where, *count, *self._variant.flags, *program]
        return self.children.start(f"{self._variant.name} (node {number})", argv, self._env)

    def first_steps(self) -> None:
        """Wait until the job has trained for a while, and nothing is being prepared any more.

        Raises:
            BenchError: it does not come to that.
        """
        deadline = time.monotonic() + _START_TIMEOUT
        while self._event(deadline, "the first steps")[1].get("step", 0) < _STEPS:
            pass
        used, since = self._preparing(), time.monotonic()
        while used is None or time.monotonic() - since < _CALM:
            self._event(deadline, "a step")
            now = self._preparing()
            if used is None or now is None or now - used > _CALM / 10:
                used, since = now, time.monotonic()

    def _preparing(self) -> float | None:
        """Processor seconds of all but agents, workers and their loaders; None if what should be there is not yet."""
        total = 0.0
        training = {*self.pids.values(), *(pid for worker in self.pids.values() for pid in descendants(worker))}
        for agent in self.agents:
            others = [pid for pid in descendants(agent.pid) if pid not in training]
            if self._variant.preloads and not any(map(is_zygote, others)):
                return None
            times = 1 + (self.losses if self._variant.standby else 0)
            if self._variant.ready and not agent.has_written(self._variant.ready, times):
                return None
            for pid in others:
                with suppress(OSError):
                    total += ProcessClock(pid).seconds()
        return total

    def kill_worker(self) -> None:
        """SIGKILL to global rank 1, and to rank 0 at each second time."""
        self.losses += 1
        os.kill(self.pids[self.losses % 2], signal.SIGKILL)

    def kill_node(self) -> None:
        """SIGKILL to an agent that does not host the control plane but has a worker, and to all that is below it."""
        workers = set(self.pids.values())
        victim = next(each for each in reversed(self.agents) if workers.intersection(descendants(each.pid)))
        self.children.expect_end(victim)
        for pid in [victim.pid, *descendants(victim.pid)]:
            with suppress(ProcessLookupError):  # those above it may have ended it already
                os.kill(pid, signal.SIGKILL)

    def next_step(self, since: float, timeout: float) -> float:
        """Seconds from a moment to the first step that is finished in a round that began later; infinite for never."""
        again = False
        try:
            while True:
                at, event = self._event(since + timeout, "the next step")
                again |= event["event"] == "training"
                if again and event["event"] == "step":
                    return at - since
        except BenchError as error:
            print(f"  {self._variant.name} never resumed: {error}", file=sys.stderr)
            return math.inf

    def step_after(self, step: int) -> dict[str, Any]:
        """The event of the first step from this one on that is told. Raises BenchError."""
        while True:
            event = self._event(time.monotonic() + _START_TIMEOUT, f"step {step}")[1]
            if event["event"] == "step" and event["step"] >= step:
                return event

    def _event(self, deadline: float, awaited: str) -> tuple[float, dict[str, Any]]:
        """The next event that a worker tells, and when it came."""
        while (found := _EVENT.search((line := self.children.next_line(deadline, awaited)).text)) is None:
            pass
        event: dict[str, Any] = json.loads(found[0])
        if event["rank"] >= 0:  # standby workers have none
            self.pids[event["rank"]] = event["pid"]
        return line.at, event


def _resumes(variant: Variant, place: Place, lose: Callable[[Job], None], construction: float, limit: float) -> float:
    with Job(variant, place, construction) as job:
        job.first_steps()
        at = time.monotonic()
        lose(job)
        return job.next_step(at, limit)


def _case(name: str, what: str, place: Place, lose: Callable[[Job], None], rounds: int = 1) -> Case:
    def run(settings: Settings) -> list[Row]:
        limit = _RESUME_TIMEOUT_QUICK if settings.quick else _RESUME_TIMEOUT
        rows: list[Row] = []
        for construction in (0.0,) if settings.quick else (0.0, _CONSTRUCTION):
            sides = {
                each.name: partial(_resumes, each, place, lose, construction, limit) for each in (TORCHRUN, *VARIANTS)
            }
            model = f", a model of {construction:g} s" if construction else ""
            turns = in_turn(f"{name}{model}", settings.rounds, sides)
            rows += [compared(f"{what}{model}: {each.name}", turns, each, construction, limit) for each in VARIANTS]
        return rows

    return Case(name, f"{what}, of examples/train_ddp.py", run, rounds)


def compared(what: str, turns: Turns[float], variant: Variant, construction: float, limit: float) -> Row:
    """Ours beside torchrun's, whose runs that never resumed count as the time that they were given.

    The ratio is then at most what is shown. One of ours that never resumed leaves us without a figure.
    """
    sides = {side: turns.results[side] for side in (variant.name, THEIRS)}
    never = {side: sum(map(math.isinf, values)) for side, values in sides.items()}
    remarks = [f"{side} not measured: {turns.failures[side]}" for side in sides if side in turns.failures]
    remarks += [
        f"{side} never resumed in {count} of {len(sides[side])} runs, given {limit:.0f} s each"
        for side, count in never.items()
        if count
    ]
    return Row(
        what,
        "s",
        sample([] if never[variant.name] else sides[variant.name]),
        sample([min(seconds, limit) for seconds in sides[THEIRS]]),
        variant.budget_construction if construction else variant.budget,
        never=f"never ({never[THEIRS]} of {len(sides[THEIRS])} runs)" if never[THEIRS] > len(sides[THEIRS]) / 2 else "",
        remarks=tuple(remarks),
    )


# Ten kills of one job

_KILLS, _KILLS_QUICK = 10, 2
_TRANSFORMER = "benchmarks/programs/transformer.py"
_KILLED = (
    replace(TORCHRUN, program=_TRANSFORMER),
    replace(VARIANTS[2], program=_TRANSFORMER),
    replace(VARIANTS[2], name="rallyrun, in-process", program=_TRANSFORMER, arguments=("--resumable",)),
    replace(VARIANTS[-1], program=_TRANSFORMER, arguments=("--resumable",)),
)
_ONE_NODE = Place(1, 1, 2)


@dataclass(frozen=True, slots=True)
class Killed:
    """Seconds from each kill to the next step; infinity for never."""

    seconds: tuple[float, ...]
    loss_at: Mapping[int, float]
    """A step after the last kill, and its loss; empty if there was none."""


def _killed(variant: Variant, kills: int, limit: float, env: Mapping[str, str]) -> Killed:
    """Kill workers of one job; one that never resumes is followed by another job."""
    seconds: list[float] = []
    while len(seconds) < kills:
        with Job(variant, _ONE_NODE, _CONSTRUCTION, env) as job:
            resumed = True
            while resumed and len(seconds) < kills:
                job.first_steps()
                at = time.monotonic()
                job.kill_worker()
                seconds.append(job.next_step(at, limit))
                resumed = seconds[-1] < math.inf
                print(f"    {variant.name}: {seconds[-1]:.2f} s from kill {len(seconds)}", file=sys.stderr)
            if resumed:
                event = job.step_after(_STEPS)
                return Killed(tuple(seconds), {event["step"]: event["loss"]})
    return Killed(tuple(seconds), {})


def _undisturbed(steps: Collection[int], env: Mapping[str, str]) -> dict[int, float]:
    """The loss of these steps in a job in which nothing happens."""
    with Job(_KILLED[0], _ONE_NODE, 0.0, env) as job:
        return {step: job.step_after(step)["loss"] for step in sorted(steps)}


def _ten_kills(settings: Settings) -> list[Row]:
    kills = _KILLS_QUICK if settings.quick else _KILLS
    with tempfile.TemporaryDirectory(prefix="rallybench-") as compiled:
        env = {"TORCHINDUCTOR_CACHE_DIR": compiled}
        _undisturbed({_STEPS}, env)  # so that all sides find the same code compiled
        sides = {each.name: partial(_killed, each, kills, _RESUME_TIMEOUT, env) for each in _KILLED}
        turns = in_turn("ten-kills", settings.rounds, sides)
        ends = {side: [each.loss_at for each in found] for side, found in turns.results.items()}
        expected = _undisturbed({step for side in ends.values() for end in side for step in end}, env)
    seconds = Turns(
        {side: [each for one in found for each in one.seconds] for side, found in turns.results.items()}, turns.failures
    )
    what = f"{kills} SIGKILLs of workers of one transformer, each to the next step"
    rows = []
    for variant in _KILLED[1:]:
        row = compared(f"{what}: {variant.name}", seconds, variant, _CONSTRUCTION, _RESUME_TIMEOUT)
        apart = [abs(loss - expected[step]) for end in ends[variant.name] for step, loss in end.items()]
        remarks = (f"the loss of a step after the last one differs by {max(apart):.1e}",) if apart else ()
        rows.append(replace(row, remarks=(*row.remarks, *remarks)))
    return rows


CASES = (
    _case(
        "next-step",
        "worker SIGKILL to the next training step, one node of two workers",
        Place(1, 1, 2),
        Job.kill_worker,
        rounds=3,
    ),
    _case(
        "next-step-2-nodes",
        "worker SIGKILL to the next training step, two nodes of one",
        Place(2, 2, 1),
        Job.kill_worker,
    ),
    _case("next-step-lost-node", "a node of three SIGKILLed to the next training step", Place(3, 2, 1), Job.kill_node),
    _case(
        "next-step-spare-node",
        "a node of three SIGKILLed to the next training step, with a spare node",
        Place(3, 3, 1, spares=1),
        Job.kill_node,
    ),
    Case("ten-kills", "SIGKILLs of workers of one job, a transformer of 5 s construction, and its loss", _ten_kills, 1),
)
