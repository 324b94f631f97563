"""The jobs on this machine, running and ended, and the names that people use for them.

Laws:

1. The name of a job is its id, its number (the process id of one of its agents), its port or its script. The first
   characters of an id are enough. A word that matches several jobs is refused with a list of them: a verb never
   guesses.
2. Agents belong to one job only if they belong to one user and meet at the same place under the same id. Ended agents
   must also have run at the same time. If several users have matching jobs, root names one as USER/NAME.
3. An endpoint, `host:port`, is not the name of a job here: it is dialled unchanged.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rallypoint.base.errors import RallypointError, UsageError
from rallypoint.base.log import printable
from rallypoint.base.procfs import read_proc_state
from rallypoint.cli.exit import print_answer
from rallypoint.features.local_jobs import EndedJob, ended_jobs, local_jobs, local_token
from rallypoint.observe.status import VERSION, duration, moment, table
from rallypoint.observe.watching.client import open_session, user_name
from rallypoint.observe.watching.messages import Snapshot, WatchRequest
from rallypoint.rendezvous.handler import LocalJob

if TYPE_CHECKING:
    from rallypoint.control.client.dialing import DialTarget
    from rallypoint.features.kept_reports import KeptReport, RankEnd

_T = TypeVar("_T")
_ENDPOINT = re.compile(r".+:[0-9]+")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_SHORT = 8
"""How many characters of a generated id a list shows."""
_LEAST_PREFIX = 4
"""Minimum number of characters of an id that name a job."""
_MOST_CANDIDATES = 8
_LOOK, _SHORT_LOOK = 3.0, 0.5
"""Seconds to wait for coordinators to answer; the second value is for other users' jobs and stopped agents."""
_LINES, _MOST_RANKS = 10, 8
"""How many lines per output, and how many ranks, to show for an ended job, unless all are requested."""
_MOST_LOOKS = 200
"""Maximum number of jobs whose coordinators are asked."""
OUTCOME_CODES = {"succeeded": 5, "failed": 4, "stopped": 4, "left": 1, "killed": 1}
"""The exit codes of `rallyctl status` for a job that ended here; 1 if its outcome is unknown."""


UNKNOWN = {name for name, code in OUTCOME_CODES.items() if code == 1}


class NoJobError(RallypointError):
    """No job on this machine has this name."""


class RunningJob(NamedTuple):
    """A job's agents on this machine, oldest first, and the job's state if its coordinator has reported it."""

    agents: tuple[LocalJob, ...]
    seen: Snapshot | None = None

    @property
    def first_agent(self) -> LocalJob:
        return self.agents[0]


def running_jobs() -> list[RunningJob]:
    """The jobs on this machine that this user may see: the user's own first, then oldest first."""
    by_meeting: dict[tuple[int, str, str, str], list[LocalJob]] = {}
    us = os.geteuid()
    for job in sorted(local_jobs(), key=lambda job: (job.user != us, job.began)):
        by_meeting.setdefault(_rendezvous_of(job), []).append(job)
    return [RunningJob(tuple(agents)) for agents in by_meeting.values()]


def past_jobs() -> list[EndedJob]:
    """This user's jobs that ended here, newest first."""
    return [_decisive_agent(agents) for agents in _past_agents()]


def _past_agents() -> list[list[EndedJob]]:
    """The agents of each job, newest first."""
    jobs: list[list[EndedJob]] = []
    for ended in ended_jobs():
        together = (
            agents
            for agents in jobs
            if _rendezvous_of(agents[0].job) == _rendezvous_of(ended.job)
            and _decisive_agent(agents).job.began < ended.ended
        )
        if agents := next(together, None):
            agents.append(ended)
        else:
            jobs.append([ended])
    return jobs


def _decisive_agent(agents: Sequence[EndedJob]) -> EndedJob:
    """The last agent that knows how the job ended."""
    return next((agent for agent in agents if agent.outcome not in UNKNOWN), agents[-1])


def _rendezvous_of(job: LocalJob) -> tuple[int, str, str, str]:
    return job.user, job.job, job.backend, job.endpoint


# Names


def is_endpoint(word: str) -> bool:
    """Whether a word is one or several complete endpoints."""
    return _ENDPOINT.fullmatch(word) is not None


def jobs_named(word: str, jobs: Sequence[RunningJob]) -> list[RunningJob]:
    user, _, name = word.partition("/")
    if name and (owned := [job for job in jobs if user == user_name(job.first_agent.user)]):
        word, jobs = name, owned
    exact = [job for job in jobs if any(_is_name(word, agent) for agent in job.agents)]
    return exact or [job for job in jobs if _begins_id(word, job.first_agent)]


def past_jobs_named(word: str, job: str) -> list[EndedJob]:
    """The jobs that ended here, with this id (empty for any) and this name or endpoint; newest first."""
    jobs = [agents for agents in _past_agents() if job in {"", agents[0].job.job}]
    if is_endpoint(word):
        matches = [agents for agents in jobs if _on_loopback(agents[0].job.endpoint) == _on_loopback(word)]
    else:
        exact = [agents for agents in jobs if not word or any(_is_name(word, agent.job) for agent in agents)]
        matches = exact or [agents for agents in jobs if _begins_id(word, agents[0].job)]
    return [_decisive_agent(agents) for agents in matches]


def _is_name(word: str, job: LocalJob) -> bool:
    return word in {job.job, str(job.pid), job.endpoint.rpartition(":")[2]} or os.path.basename(word) == job.script


def _begins_id(word: str, job: LocalJob) -> bool:
    return len(word) >= _LEAST_PREFIX and job.job.startswith(word)


def _on_loopback(endpoint: str) -> str:
    return endpoint.replace("localhost:", "127.0.0.1:")


def job_named(word: str, job: str) -> RunningJob | None:
    """The job on this machine with this name (empty for the only one) and this id (empty for any).

    Returns:
        None if no job has this name, but the name can be a host's.

    Raises:
        UsageError: several jobs match. NoJobError: no job matches.
    """
    jobs = [running for running in running_jobs() if job in {"", running.first_agent.job}]
    matches = jobs_named(word, jobs) if word else jobs
    what = word or job
    if len(matches) == 1:
        return matches[0]
    if matches:
        which = f"{what!r} matches {len(matches)} jobs" if what else f"there are {len(matches)} jobs"
        users = len({running.first_agent.user for running in matches}) > 1
        how = "USER/NAME or the number" if users else "the number, port or endpoint of one"
        raise UsageError(f"{which} on this machine; use {how}:\n{candidates(matches)}")
    if past := past_jobs_named(word, job) if what else []:
        logs = f"; its logs are in {past[0].log_dir}" if past[0].log_dir else ""
        more = f"; 'rallyctl status {what}' shows its report"
        raise NoJobError(
            f"no job {what!r} is running on this machine; the last one {_ending(past[0], time.time())}{logs}{more}"
        )
    if word and not word.isdecimal() and os.sep not in word and not word.endswith(".py"):
        _refuse_other_case(word, jobs)
        return None
    named = f"named {what!r} (by id, number, port or script)" if what else ""
    raise NoJobError(
        f"no job of this user is {named or 'running'} on this machine; "
        + ("'rallyctl status' lists the running jobs" if named else "use the job's --rdzv-endpoint")
    )


def _refuse_other_case(word: str, jobs: Sequence[RunningJob]) -> None:
    """Raise NoJobError if the word is a job's name in the wrong case, since it then does not mean a host."""
    names = {name.lower(): name for job in jobs for name in (job.first_agent.job, job.first_agent.script)}
    if word.lower() in names:
        raise NoJobError(f"no job on this machine is named {word!r}; did you mean {names[word.lower()]}?")


def candidates(jobs: Sequence[RunningJob]) -> str:
    """A table of jobs to choose from."""
    firsts = [job.first_agent for job in jobs[:_MOST_CANDIDATES]]
    now = time.time()
    rows = [
        (str(agent.pid), agent.job, agent.script, agent.endpoint, duration(now - agent.began), user_name(agent.user))
        for agent in firsts
    ]
    lines = table([("NUMBER", "JOB", "SCRIPT", "ENDPOINT", "AGE", "USER"), *rows])
    more = [f"and {len(jobs) - len(firsts)} more; 'rallyctl status' lists all"] if len(jobs) > len(firsts) else []
    return "\n".join([*lines, *more])


def either_order(options: argparse.Namespace, operand: str, fits: re.Pattern[str]) -> None:
    """Find out which of two words is the job, and which is the verb's own operand, which matches `fits`.

    Raises:
        UsageError: either word could be the job.
    """
    first, second = getattr(options, operand), options.endpoint
    orders = [order for order in ((first, second), (second, first)) if fits.fullmatch(order[0])] if second else []
    matches = [order for order in orders if is_endpoint(order[1])]
    if len(orders) != 1 and not matches and second:
        jobs = running_jobs()
        matches = [
            order for order in orders or [(second, first)] if is_endpoint(order[1]) or jobs_named(order[1], jobs)
        ]
    if len(matches) > 1:
        raise UsageError(f"either {first} or {second} could be the job; select the job with --rdzv-endpoint")
    if chosen := matches or orders:
        setattr(options, operand, chosen[0][0])
        options.endpoint = chosen[0][1]


# Coordinators and their state


def targets_of(job: LocalJob, config: Mapping[str, Any]) -> list[DialTarget]:
    """Where the coordinator of a job on this machine may be. If this command has no secret, use the job's token from
    its agent.
    """
    from rallypoint.base.secrets import Secret
    from rallypoint.rendezvous.coordinators import coordinators
    from rallypoint.rendezvous.params import RendezvousParameters

    targets = coordinators(RendezvousParameters(job.backend, job.endpoint, job.job, 1, 1, **config))
    if all(target.key is not None for target in targets) or not (token := local_token(job)):
        return targets
    key = Secret((token,)).keys(job.job)[0]
    return [target._replace(key=key) for target in targets]


def with_snapshots(jobs: Sequence[RunningJob], config: Mapping[str, Any]) -> list[RunningJob]:
    """Add the state to each job; ask all coordinators in parallel."""

    async def with_snapshot(job: RunningJob) -> RunningJob:
        is_own = job.first_agent.user == os.geteuid()
        patience = _LOOK if is_own and not all(map(_is_stopped, job.agents)) else _SHORT_LOOK
        try:
            async with asyncio.timeout(patience):
                # Another user may have written this address: do not send this command's options there.
                where = await asyncio.to_thread(targets_of, job.first_agent, config if is_own else {})
                async with await open_session(where, job.first_agent.job) as session:
                    return job._replace(seen=await session.snapshot(WatchRequest()))
        except Exception:  # another user may have written anything here
            return job

    async def look_at_all() -> list[RunningJob]:
        asyncio.get_running_loop().set_default_executor(_Unawaited())
        return await asyncio.gather(*map(with_snapshot, jobs[:_MOST_LOOKS]))

    return [*asyncio.run(look_at_all()), *jobs[_MOST_LOOKS:]]


class _Unawaited(ThreadPoolExecutor):
    """Runs each call on its own daemon thread: a name server may need longer than this command is willing to wait."""

    def submit(self, call: Callable[..., _T], /, *args: Any, **more: Any) -> Future[_T]:
        future: Future[_T] = Future()

        def work() -> None:
            future.set_running_or_notify_cancel()  # it can no longer be cancelled
            try:
                future.set_result(call(*args, **more))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None: ...


def _is_stopped(agent: LocalJob) -> bool:
    """Whether SIGSTOP or a debugger prevents an agent from answering."""
    return read_proc_state(agent.pid) in {"T", "t"}


# Output


def jobs_here_json(
    jobs: Sequence[RunningJob], past: Sequence[EndedJob], now: float, reports: Sequence[KeptReport] | None = None
) -> str:
    """`reports`: the saved reports of the only job in `past`; None if not requested."""
    kept = {} if reports is None else _kept_fields(reports)
    ended = [_past_fields(job) | kept for job in past]
    return json.dumps(
        {"version": VERSION, "jobs": [_running_fields(job, now) for job in jobs], "ended": ended}, indent=2
    )


def show_jobs(jobs: Sequence[RunningJob], past: Sequence[EndedJob], options: argparse.Namespace) -> None:
    """Print the jobs on this machine."""
    now = time.time()
    if options.json:
        print_answer(jobs_here_json(jobs, past, now))
        return
    none = "no job of this user is running on this machine; for a job elsewhere, use its --rdzv-endpoint"
    lines = _running_lines(jobs, now) if jobs else [none]
    if options.all and past:
        lines += ["", "ended", *_past_lines(past, now), "'rallyctl status NUMBER' shows the report of one"]
    elif past:
        lines.append(f"{len(past)} {'has' if len(past) == 1 else 'have'} ended here: rallyctl status --all")
    print_answer("\n".join(lines))


def _running_lines(jobs: Sequence[RunningJob], now: float) -> list[str]:
    rows = [("JOB", "PHASE", "AGE", "NODES", "RESTARTS", "SCRIPT", "USER", "ENDPOINT", "NUMBER")]
    for job, seen in ((running.first_agent, running.seen) for running in jobs):
        stands = ("unreachable", "-", "-")
        if seen is not None:
            nodes = f"{seen.totals.in_round} of {seen.max_nodes}"
            stands = (seen.phase.value, nodes, str(seen.ended_rounds.failures))
        phase, nodes, restarts = stands
        more = (job.script or "-", user_name(job.user), job.endpoint, str(job.pid))
        rows.append((_shortened(job.job), phase, duration(now - job.began), nodes, restarts, *more))
    return table(rows)


def _past_lines(jobs: Sequence[EndedJob], now: float) -> list[str]:
    rows = [("JOB", "OUTCOME", "ENDED", "TOOK", "RESTARTS", "SCRIPT", "NUMBER", "WHY")]
    for ended in jobs:
        job = ended.job
        times = (f"{duration(now - ended.ended)} ago", duration(ended.seconds))
        rows.append(
            (
                _shortened(job.job),
                ended.outcome,
                *times,
                str(ended.restarts),
                job.script or "-",
                str(job.pid),
                ended.detail,
            )
        )
    return table(rows)


def show_past(job: EndedJob, options: argparse.Namespace) -> int:
    """Print how a job ended, with its report. Returns the exit code."""
    reports = _reports_of(job)
    if options.json:
        print_answer(jobs_here_json([], [job], time.time(), reports))
        return OUTCOME_CODES[job.outcome]
    rows = {
        "job": job.job.job,
        "phase": f"{_ending(job, time.time())}",
        "took": duration(job.seconds),
        "round": "none" if job.round < 0 else str(job.round),
        "restarts": f"{job.restarts} of {job.max_restarts} used",
        "script": job.job.script,
        "agent": f"{job.job.pid} on this machine",
        "logs": job.log_dir or "none",
    }
    lines = [f"{name:<8}  {text}" for name, text in rows.items()]
    print_answer("\n".join([*lines, *_kept_lines(job, reports, all_ranks=options.all)]))
    return OUTCOME_CODES[job.outcome]


def _reports_of(job: EndedJob) -> list[KeptReport]:
    """The reports that a job's agents saved here: the one with the job's first failure, then the one that knows how
    it ended.
    """
    from rallypoint.features.kept_reports import kept_report

    agents = next((agents for agents in _past_agents() if job in agents), [job])
    found = [kept_report(agent.job) for agent in sorted(agents, key=lambda agent: agent != job)]
    return sorted((kept for kept in found if kept is not None), key=lambda kept: not kept.has_cause)


def _kept_lines(job: EndedJob, reports: Sequence[KeptReport], *, all_ranks: bool) -> list[str]:
    """The report, and the last output of failed ranks, or of all ranks if none failed; nothing after a success."""
    report = next((kept.report for kept in reports if kept.report), ())
    lines: list[str] = []
    if report and (job.outcome == "failed" or len(report) > 1):
        lines.append("")
        if job.outcome == "killed":
            lines.append(f"its last failure before that, in round {reports[0].round}:")
        lines += report
    ends = sorted((end for kept in reports for end in kept.ranks), key=lambda end: end.rank)
    chosen = ends
    if not all_ranks:
        failed = [end for end in ends if end.ending == "failed"]
        chosen = [] if job.outcome == "succeeded" else (failed or ends)[:_MOST_RANKS]
    known = {line.strip().removeprefix("traceback : ") for line in report}
    for end in chosen:
        lines += _rank_lines(end, known, whole=all_ranks)
    if not all_ranks and any(end.stdout or end.stderr for end in ends):
        lines += ["", f"'rallyctl status {job.job.pid} --all' shows the last output of each rank"]
    return lines


def _rank_lines(end: RankEnd, known: Collection[str], *, whole: bool) -> Iterator[str]:
    """The last lines of each of a rank's outputs, unless the report contains them."""
    code = "" if end.exit_code is None else f", {_exit_words(end.exit_code)}"
    for name, lines, path in (
        ("standard output", end.stdout, end.stdout_file),
        ("standard error", end.stderr, end.stderr_file),
    ):
        shown = lines if whole else lines[-_LINES:]
        if not shown or (not whole and all(line.strip() in known for line in shown)):
            continue
        yield ""
        yield f"rank {end.rank} ({end.ending or 'ended'}{code}), {name}{f', all of it in {path}' if path else ''}:"
        yield from (f"  {printable(line, len(line))}" for line in shown)


def _exit_words(code: int) -> str:
    from rallypoint.base.signals import signal_name

    return signal_name(-code) if code < 0 else f"exit code {code}"


def sentence_of(job: EndedJob) -> str:
    """How a job ended, in the words of its control plane."""
    if job.outcome == "failed" and job.detail:
        return f"the job has failed: {job.detail}"
    return job.detail or f"the job has {job.outcome}"


def past_of(job: LocalJob) -> list[EndedJob]:
    """How a job on this machine, and earlier jobs with the same id and place, ended; newest first."""
    return [
        _decisive_agent(agents) for agents in _past_agents() if _rendezvous_of(agents[0].job) == _rendezvous_of(job)
    ]


def _ending(job: EndedJob, now: float) -> str:
    how = "left by this node" if job.outcome == "left" else job.outcome
    return f"{how} {duration(now - job.ended)} ago{f': {job.detail}' if job.detail else ''}"


def _shortened(job: str) -> str:
    return job[:_SHORT] if _UUID.fullmatch(job) else job


def _job_fields(job: LocalJob) -> dict[str, Any]:
    return {
        "job": job.job,
        "backend": job.backend,
        "endpoint": job.endpoint,
        "pid": job.pid,
        "script": job.script,
        "user": user_name(job.user),
        "began": moment(job.began),
    }


def _running_fields(job: RunningJob, now: float) -> dict[str, Any]:
    seen = job.seen
    return {
        **_job_fields(job.first_agent),
        "age_seconds": round(now - job.first_agent.began, 3),
        "agents": [agent.pid for agent in job.agents],
        "phase": None if seen is None else seen.phase.value,
        "round": None if seen is None else seen.round,
        "restarts": None if seen is None else seen.ended_rounds.failures,
        "nodes": None if seen is None else seen.totals.in_round,
        "max_nodes": None if seen is None else seen.max_nodes,
    }


def _kept_fields(reports: Sequence[KeptReport]) -> dict[str, Any]:
    ranks = [
        end._asdict() | {"host": kept.host, "stdout": "\n".join(end.stdout), "stderr": "\n".join(end.stderr)}
        for kept in reports
        for end in kept.ranks
    ]
    report = next(("\n".join(kept.report) for kept in reports if kept.report), None)
    return {"report": report, "ranks": sorted(ranks, key=lambda fields: fields["rank"])}


def _past_fields(job: EndedJob) -> dict[str, Any]:
    return {
        **_job_fields(job.job),
        "ended": moment(job.ended),
        "age_seconds": round(job.seconds, 3),
        "outcome": job.outcome,
        "detail": job.detail,
        "round": None if job.round < 0 else job.round,
        "restarts": job.restarts,
        "max_restarts": job.max_restarts,
        "log_dir": job.log_dir,
    }
