"""A seed becomes plain data: the job's settings, its nodes, and the faults with their times.

A scenario can be cut down (`shrink`). Each node and each fault stands for itself, and every random draw during the run
comes from a stream named after the scenario's seed and the drawing part, so that leaving one thing out changes as
little as possible of the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from random import Random
from typing import NamedTuple

from rallypoint.control.election.keys import PART_SIZE, SEATS

SERVER = -1
"""Stands for the control server where a fault names its target."""


class NodePlan(NamedTuple):
    """One agent: its number, when it starts, how many workers it has, whether it hosts the control server, and whether
    its workers can go on in their processes when a round ends."""

    number: int
    start: float = 0.0
    size: int = 1
    hosts: bool = False
    resumable: bool = False
    domain: str = ""


class Fault(NamedTuple):
    """Something that goes wrong `at` a moment of the true time, with `node`, for `length` seconds.

    `amount` is what else the kind needs.
    """

    at: float
    kind: str
    node: int
    length: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        target = "the server" if self.node == SERVER else f"node {self.node}"
        return f"at {self.at:.3f} {self.kind} of {target}" + (f" for {self.length:.3f} s" if self.length else "")


class FailureRates(NamedTuple):
    """How the workers of this job are: how long they run, how often they fail or hang before the calm."""

    shortest: float
    longest: float
    fails: float
    hangs: float
    infects: float
    """How likely a node's workers fail because those of another node of their round did."""


class Scenario(NamedTuple):
    """Everything about one run."""

    seed: int
    min_nodes: int
    max_nodes: int
    max_restarts: int
    lease: float
    last_call: float
    join_timeout: float
    grace: float
    notice_timeout: float
    backoff: float
    delay: float
    temper: FailureRates
    nodes: tuple[NodePlan, ...]
    faults: tuple[Fault, ...]
    calm: float
    """From then on nothing goes wrong any more, and all workers succeed."""
    abandoned: bool
    """Nobody brings the control server back at the calm."""
    etcd: bool = False
    """The control plane is kept in etcd, and its server elected."""
    seats: int = SEATS
    """How many agents stand for election there."""
    part_size: int = PART_SIZE
    """Bytes in one value there."""
    check: float = 0.0
    """The longest that the user's check of a node takes, in seconds; 0 where there is none."""
    silences: bool = False
    """Whether workers fall silent now and then, and give signs again."""
    segment: int = 1
    """The number of nodes of one domain with adjacent ranks."""

    @property
    def hosted(self) -> bool:
        """Whether a node hosts the control server from the beginning."""
        return any(node.hosts and not node.start for node in self.nodes)

    def in_whole_segments(self, numbers: Iterable[int]) -> int:
        """How many of these nodes whole segments come to."""
        domains = {node.number: node.domain for node in self.nodes}
        return (
            sum(count // self.segment for count in Counter(domains[each] for each in numbers).values()) * self.segment
        )

    def stream(self, name: str) -> Random:
        """The random stream of that name."""
        return Random(f"{self.seed}/{name}")


class _Draw(NamedTuple):
    """What the makers of faults are handed."""

    rng: Random
    at: float
    node: int
    lease: float


def _length(draw: _Draw) -> float:
    """Shorter than the lease, about as long, or much longer."""
    return draw.lease * draw.rng.choice([0.1, 0.5, 0.9, 1.1, 1.6, 2.2, 4.0, 9.0]) * draw.rng.uniform(0.8, 1.2)


def _lasting(kind: str) -> Callable[[_Draw], Fault]:
    return lambda draw: Fault(draw.at, kind, draw.node, _length(draw))


def _sudden(kind: str) -> Callable[[_Draw], Fault]:
    return lambda draw: Fault(draw.at, kind, draw.node)


def _at_server(kind: str) -> Callable[[_Draw], Fault]:
    return lambda draw: Fault(draw.at, kind, SERVER, _length(draw))


def _jump(draw: _Draw) -> Fault:
    return Fault(draw.at, "clock-jump", draw.node, 0.0, draw.rng.choice([-3600.0, -5.0, 5.0, 3600.0]))


def _preempt(draw: _Draw) -> Fault:
    return Fault(draw.at, "terminate", draw.node, 0.0, draw.rng.uniform(0.5, 5.0))


_MAKERS: dict[str, Callable[[_Draw], Fault]] = {
    "worker-failure": _sudden("worker-failure"),
    "agent-kill": _sudden("agent-kill"),
    "power-off": _sudden("power-off"),
    "terminate": _preempt,
    "agent-pause": _lasting("agent-pause"),
    "cut": _lasting("cut"),
    "cut-all": _lasting("cut-all"),
    "reset": _sudden("reset"),
    "half-open": _sudden("half-open"),
    "server-pause": _at_server("server-pause"),
    "server-kill": _at_server("server-kill"),
    "server-power-off": _at_server("server-power-off"),
    "clock-jump": _jump,
    "close": _sudden("close"),
}
_ETCD_MAKERS: dict[str, Callable[[_Draw], Fault]] = _MAKERS | {
    "coordinator-cut": _at_server("cut"),
    "coordinator-etcd-cut": _at_server("etcd-cut"),
    "coordinator-isolate": _at_server("isolate"),
    "coordinator-lease-end": lambda draw: Fault(draw.at, "lease-end", SERVER),
    "etcd-away": _at_server("etcd-away"),
    "etcd-cut-all": _at_server("etcd-cut-all"),
    "etcd-cut": _lasting("etcd-cut"),
    "etcd-losing": _at_server("etcd-losing"),
    "etcd-slow": lambda draw: _at_server("etcd-slow")(draw)._replace(amount=draw.rng.choice([0.1, 0.5, 4.0])),
    "isolate": _lasting("isolate"),
    "lease-end": _sudden("lease-end"),
    "watch-lost": _sudden("watch-lost"),
}
"""What makes a fault of each kind. Late nodes are nodes that start late."""

_THEMES: tuple[dict[str, int], ...] = (
    dict.fromkeys(_MAKERS, 2) | {"close": 0, "worker-failure": 6, "cut": 4},
    {"worker-failure": 6, "agent-kill": 2, "terminate": 2, "agent-pause": 1, "reset": 1},
    {"cut": 5, "reset": 3, "half-open": 3, "agent-pause": 3, "worker-failure": 3, "clock-jump": 2, "cut-all": 1},
    {"server-kill": 4, "server-power-off": 1, "cut": 4, "worker-failure": 4, "agent-kill": 1, "terminate": 1},
    {"server-pause": 4, "agent-pause": 3, "cut": 2, "worker-failure": 2, "half-open": 1, "close": 1},
)
"""How often each kind is drawn: everything at once, and what belongs together more often than chance would have it."""

_OUTAGES = {"etcd-away": 3, "etcd-cut-all": 3, "etcd-cut": 3, "etcd-losing": 3, "etcd-slow": 2, "watch-lost": 1}
_ETCD_THEMES: tuple[dict[str, int], ...] = (
    dict.fromkeys(_ETCD_MAKERS, 2) | {"close": 0, "worker-failure": 8, "cut-all": 1},
    _OUTAGES,
    _OUTAGES | {"worker-failure": 6, "lease-end": 2, "coordinator-lease-end": 3, "coordinator-etcd-cut": 3},
    _OUTAGES | {"server-kill": 6, "server-power-off": 4, "server-pause": 4, "worker-failure": 8, "agent-kill": 2},
    {"server-kill": 4, "agent-kill": 3, "terminate": 2, "worker-failure": 5, "server-pause": 3, "lease-end": 2},
    {
        "coordinator-isolate": 4,
        "isolate": 2,
        "cut": 2,
        "coordinator-cut": 2,
        "worker-failure": 4,
        "etcd-losing": 2,
        "reset": 1,
    },
)
"""The same, where the control plane is in etcd."""
_ETCD_SHARE = 0.3
_OPERATOR_SHARE = 0.3
_PREEMPTED_SHARE = 0.11
_COMMANDS = {"op-watch": 3, "op-restart": 3, "op-drain": 3, "op-resize": 3, "op-stop": 1}
"""How often an operator does what, in the seeds that have one."""
FIRST_WITH_DOMAINS, WITH_DOMAINS_EVERY = 1_000_000, 5
INPROCESS_TIMEOUT = 2.0
"""Seconds that a worker has to come out of its function."""


def has_domains(seed: int) -> bool:
    """Whether the job of this seed has ranks in segments; seeds below a million are what they were without these."""
    return seed >= FIRST_WITH_DOMAINS and seed % WITH_DOMAINS_EVERY == 0


def generate(seed: int) -> Scenario:
    """The scenario of a seed."""
    return _in_domains(_generate(seed)) if has_domains(seed) else _generate(seed)


def _in_domains(scenario: Scenario) -> Scenario:
    """The same job on machines that form domains, some of which are lost as a whole; from a stream of its own."""
    rng = Random(f"domains/{scenario.seed}")
    segment, number = rng.choice([2, 2, 3]), rng.choice([1, 2, 3, 4])
    least = segment * max(1, scenario.min_nodes // segment)
    most = least + segment * rng.choice([0, 0, 1, 2])
    nodes = [node._replace(domain=f"rack-{rng.randrange(number)}") for node in scenario.nodes]
    scenario = scenario._replace(segment=segment, min_nodes=least, max_nodes=most, nodes=tuple(nodes))
    enough = least + rng.choice([0, 0, segment, 2 * segment])
    while scenario.in_whole_segments(node.number for node in nodes) < enough:
        nodes.append(NodePlan(len(nodes), rng.uniform(0, 2), domain=f"rack-{rng.randrange(number)}"))
        scenario = scenario._replace(nodes=tuple(nodes))
    later = rng.choice([0, 0, segment, 2 * segment])
    nodes += [
        NodePlan(len(nodes) + each, rng.uniform(2, 20), domain=f"rack-{rng.randrange(number)}") for each in range(later)
    ]
    scenario = scenario._replace(nodes=tuple(nodes))
    lost = [
        Fault(rng.uniform(0.0, 20.0), rng.choice(["domain-killed", "domain-off"]), rng.choice(nodes).number)
        for _ in range(rng.choice([0, 1, 1, 2]))
    ]
    over = max([scenario.calm, *(fault.at + 0.5 for fault in lost), *(node.start + 0.5 for node in nodes)])
    return scenario._replace(faults=tuple(sorted([*scenario.faults, *lost])), calm=over)


def _generate(seed: int) -> Scenario:
    rng = Random(f"scenario/{seed}")
    count = rng.choice([1, 2, 2, 3, 3, 4, 5, 8])
    min_nodes = rng.randint(1, count)
    max_nodes = rng.choice([count, count, count + 1, count + 2, min_nodes])
    lease = rng.choice([1.0, 2.0, 3.0])
    span = rng.choice([5.0, 10.0, 20.0])
    hosted = rng.random() < 0.4
    etcd = Random(f"etcd/{seed}").random() < _ETCD_SHARE
    hosted = hosted and not etcd
    lease = max(lease, 1.5) if etcd else lease
    nodes = [
        NodePlan(number, 0.0 if number == 0 else rng.choice([0.0, rng.uniform(0, 2)]), rng.randint(1, 3), False)
        for number in range(count)
    ]
    if hosted:
        nodes[0] = nodes[0]._replace(hosts=True)
    nodes += [
        NodePlan(number, rng.uniform(0.5, span), rng.randint(1, 3), hosted and rng.random() < 0.3)
        for number in range(count, count + rng.choice([0, 0, 1, 1, 2, 3]))
    ]
    faults = _faults(rng, nodes, span, lease, *((_ETCD_THEMES, _ETCD_MAKERS) if etcd else (_THEMES, _MAKERS)))
    nodes = _resumable(seed, nodes)
    faults = sorted([*faults, *_commands(seed, nodes, span), *_preemptions(seed, nodes, span)])
    over = max((fault.at + fault.length for fault in faults), default=0.0)
    return Scenario(
        seed=seed,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        max_restarts=rng.choice([0, 1, 2, 3, 10]),
        lease=lease,
        last_call=rng.choice([0.5, 2.0, 5.0]),
        join_timeout=rng.choice([8.0, 20.0, 60.0]),
        grace=rng.choice([0.2, 1.0, 4.0]),
        notice_timeout=rng.choice([0.0, 0.0, 2.0]),
        backoff=rng.choice([0.0, 0.0, 0.0, 0.5]),
        delay=rng.choice([0.0005, 0.002, 0.02]),
        temper=FailureRates(
            shortest=rng.choice([0.2, 2.0]),
            longest=rng.choice([3.0, 15.0, 30.0]),
            fails=rng.choice([0.0, 0.1, 0.4]),
            hangs=rng.choice([0.0, 0.1]),
            infects=0.7,
        ),
        nodes=tuple(nodes),
        faults=tuple(faults),
        calm=max(over, *(node.start for node in nodes)) + 0.5,
        abandoned=rng.random() < 0.05 and not etcd,
        etcd=etcd,
        seats=Random(f"seats/{seed}").choice([1, 2, 3, SEATS]),
        part_size=Random(f"parts/{seed}").choice([100, 300, PART_SIZE]),
        check=Random(f"checks/{seed}").choice([0.0, 0.0, 0.0, 0.1, 3.0]),
        silences=0.2 < Random(f"{seed}/signs").random() < 0.5,
    )


def _resumable(seed: int, nodes: list[NodePlan]) -> list[NodePlan]:
    """The nodes whose workers can go on in their processes: none, all or some; from a stream of its own."""
    rng = Random(f"resumable/{seed}")
    share = rng.choice([0.0, 0.0, 1.0, 1.0, 0.7])
    return [node._replace(resumable=rng.random() < share) for node in nodes]


def _commands(seed: int, nodes: list[NodePlan], span: float) -> list[Fault]:
    """What operators do; from a stream of its own."""
    rng = Random(f"operators/{seed}")
    if rng.random() >= _OPERATOR_SHARE:
        return []
    kinds = rng.choices(list(_COMMANDS), list(_COMMANDS.values()), k=rng.choice([1, 2, 3, 5]))
    return [
        Fault(rng.uniform(0.0, span), kind, rng.choice(nodes).number, 0.0, float(rng.randint(0, 2 * len(nodes))))
        for kind in kinds
    ]


def _preemptions(seed: int, nodes: list[NodePlan], span: float) -> list[Fault]:
    """Which nodes are told that the whole job will be taken away, and in how many seconds; from a stream of its own."""
    rng = Random(f"preemptions/{seed}")
    if rng.random() >= _PREEMPTED_SHARE:
        return []
    return [
        Fault(rng.uniform(0.0, span), "preempt-job", rng.choice(nodes).number, 0.0, rng.choice([0.5, 3.0, 12.0]))
        for _ in range(rng.choice([1, 1, 2, 3]))
    ]


def _faults(
    rng: Random,
    nodes: list[NodePlan],
    span: float,
    lease: float,
    themes: tuple[dict[str, int], ...],
    makers: dict[str, Callable[[_Draw], Fault]],
) -> list[Fault]:
    theme = rng.choice(themes)
    kinds, weights = list(theme), list(theme.values())
    faults: list[Fault] = []
    for _ in range(rng.choice([0, 1, 2, 3, 4, 6, 8, 12])):
        # Half of them strike close after another: that is where things go wrong.
        close = faults and rng.random() < 0.5
        at = rng.choice(faults).at + rng.expovariate(2.0) if close else rng.uniform(0.0, span)
        (kind,) = rng.choices(kinds, weights)
        faults.append(makers[kind](_Draw(rng, at, rng.choice(nodes).number, lease)))
    return sorted(faults)
