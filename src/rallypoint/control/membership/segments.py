"""Membership and group ranks with segments: N adjacent ranks on nodes of one domain.

A domain is a set of machines whose GPUs are better connected with each other than with others, such as an NVLink domain
or a block of Slurm's topology. With segments, a forming round accepts all nodes that ask. When it is complete, the
whole segments are known, and the nodes left over become spares. While the round runs, a spare that completes another
segment of its domain waits for the next round on behalf of that segment. The others stay spares until the round ends,
when all ask again. Only jobs with segments import this module. Laws of `segment_ranks`:

1. The ranks are 0..n-1, each used once. n is the number of nodes in whole segments, limited by the job's maximum.
2. The nodes with ranks iN..iN+N-1 belong to one domain.
3. No other choice within these laws lets more survivors keep their group ranks.
4. Among choices equal under law 3, none lets more survivors take part.
5. A gap is filled from its own domain, by a new node unless a survivor would lose its place to that node. A segment
   that moves stays together, in its order.
6. New segments follow the order of the ranks that their nodes request; those of one domain are adjacent.
7. The time is O(n log n). `nodes_in_segments` and `completes_segment` do not examine single nodes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from rallypoint.base.errors import UsageError
from rallypoint.base.light_typing import NamedTuple, TypeVar
from rallypoint.control.membership.mappings import tally, with_entry, without
from rallypoint.control.membership.state import NodeId, NodeInfo, Participant, Settings, State

N = TypeVar("N")


class Claim(NamedTuple):
    """A node's claim to a rank: its domain, its previous group rank, and the rank that it requests."""

    domain: str
    previous: int | None = None
    hint: int | None = None


def segment_ranks(claims: Mapping[N, Claim], size: int, most: int) -> dict[N, int]:
    """Assign group ranks to the nodes that take part, out of all claims, in order; `size` nodes are a segment."""
    domains: dict[str, list[N]] = {}
    for node in sorted(claims, key=lambda node: _or_last(claims[node].hint)):
        domains.setdefault(claims[node].domain, []).append(node)
    number = min(most // size, sum(len(nodes) // size for nodes in domains.values()))
    placed: dict[int, N] = {}
    slots: dict[str, list[int]] = {domain: [] for domain in domains}
    for slot, domain, stay in _by_survivors(claims, size, number):
        if len(slots[domain]) < len(domains[domain]) // size:
            slots[domain].append(slot)
            placed |= stay
    added = _numbers_added(claims, domains, slots, size, number)
    stayed = set(placed.values())
    further: list[list[N]] = []
    for domain, nodes in domains.items():
        holes = [rank for slot in sorted(slots[domain]) for rank in _ranks_of(slot, size) if rank not in placed]
        old, new = _whole_first(claims, [node for node in nodes if node not in stayed], size)
        by_new = min(len(holes), max(0, len(holes) + size * added[domain] - len(old)))
        left = len(old) - len(holes) + by_new
        placed.update(zip(holes, new[:by_new] + old[left:], strict=True))
        rest = old[:left] + new[by_new:]
        further += [rest[start : start + size] for start in range(0, size * added[domain], size)]
    taken = {slot for domain_slots in slots.values() for slot in domain_slots}
    free = (slot for slot in range(number) if slot not in taken)
    further.sort(key=lambda nodes: min(_or_last(claims[node].previous) for node in nodes))
    for slot, nodes in zip(free, further, strict=True):
        placed.update(zip(_ranks_of(slot, size), nodes, strict=True))
    return {node: rank for rank, node in placed.items()}


def ranks_and_spares(
    state: State, nodes: Sequence[NodeId], settings: Settings
) -> tuple[dict[NodeId, int], Mapping[NodeId, NodeInfo]]:
    """Group ranks of the joined `nodes`, in order, in a round that is complete now, and its spares."""
    places = [state.participants[node] for node in nodes]
    claims = [
        Claim(participant.node_info.domain, participant.previous_rank, participant.node_info.rank_hint)
        for participant in places
    ]
    ranks = segment_ranks(dict(zip(nodes, claims, strict=True)), settings.segment, settings.max_nodes)
    spares = {node: participant.node_info for node, participant in state.participants.items() if node not in ranks}
    return ranks, {**state.redundancy_list, **spares}


def _or_last(rank: int | None) -> float:
    return math.inf if rank is None else rank


def _ranks_of(slot: int, size: int) -> range:
    return range(slot * size, (slot + 1) * size)


def _by_survivors(claims: Mapping[N, Claim], size: int, number: int) -> list[tuple[int, str, dict[int, N]]]:
    """Segments of the previous round that can stay in place, those with most survivors first: number, domain, and
    survivors by rank."""
    by_slot: dict[int, dict[str, dict[int, N]]] = {}
    for node, (domain, previous, _) in claims.items():
        if previous is not None and previous < number * size:
            by_slot.setdefault(previous // size, {}).setdefault(domain, {}).setdefault(previous, node)
    # They belong to one domain, unless a node returned with another domain name.
    most = [(slot, *max(by_domain.items(), key=lambda entry: len(entry[1]))) for slot, by_domain in by_slot.items()]
    return sorted(most, key=lambda entry: (-len(entry[2]), entry[0]))


def _numbers_added(
    claims: Mapping[N, Claim], domains: Mapping[str, list[N]], slots: Mapping[str, list[int]], size: int, number: int
) -> Counter[str]:
    """Number of additional segments of each domain, `number` in total; domains with most survivors come first."""
    offers: list[tuple[int, str]] = []
    for domain, nodes in domains.items():
        survivors = sum(claims[node].previous is not None for node in nodes)
        more = range(len(slots[domain]), len(nodes) // size)
        offers += [(min(size, max(0, survivors - size * before)), domain) for before in more]
    offers.sort(key=lambda offer: -offer[0])
    return Counter(domain for _, domain in offers[: number - sum(map(len, slots.values()))])


def _whole_first(claims: Mapping[N, Claim], nodes: list[N], size: int) -> tuple[list[N], list[N]]:
    """Survivors among `nodes`, those of the fullest segments first, and the other nodes."""
    together = Counter(previous // size for node in nodes if (previous := claims[node].previous) is not None)
    ranked = [(-together[rank // size], rank, node) for node in nodes if (rank := claims[node].previous) is not None]
    old = [node for *_, node in sorted(ranked, key=lambda entry: entry[:2])]
    return old, [node for node in nodes if claims[node].previous is None]


def checked_size(given: object, min_nodes: int, *, fixed_ranks: bool) -> int:
    """Number of nodes per segment. Raises UsageError if a job of this size cannot have it."""
    try:
        size = int(str(given))
    except ValueError:
        size = 0
    if size < 1 or min_nodes % size:
        raise UsageError(
            f"--segment={given} does not divide the minimum of --nnodes, which is {min_nodes}; set it to a divisor of "
            "that number"
        )
    if fixed_ranks and size > 1:
        raise UsageError("--segment has no effect on static ranks; use --rdzv-backend=c10d")
    return size


# Nodes that fit among those joined or waiting


def _domain_of(_node: NodeId, participant: Participant) -> str:
    return participant.node_info.domain


def _domain_of_waiting(_node: NodeId, node_info: NodeInfo) -> str:
    return node_info.domain


def _number_of(_domain: str, number: int) -> int:
    return number


def nodes_in_segments(participants: Mapping[NodeId, Participant], settings: Settings) -> int:
    """The number of joined nodes that fit into whole segments."""
    if len(participants) < settings.segment:
        return 0
    alike = tally(tally(participants, _domain_of), _number_of)
    whole = sum(domains * (number // settings.segment) for number, domains in alike.items())
    return min(whole * settings.segment, settings.max_nodes)


def completes_segment(state: State, node: NodeId, domain: str, settings: Settings) -> bool:
    """Whether this node and the spares of its domain form another segment, and the running round has room."""
    size = settings.segment
    if len(state.participants) + size * (len(state.wait_list) + 1) > settings.max_nodes:
        return False
    spares, waiting = _numbers_waiting(state, domain)
    return (spares - (node in state.redundancy_list) + waiting + 1) // size > waiting


def _numbers_waiting(state: State, domain: str) -> tuple[int, int]:
    """Numbers of a domain's spares, and of its nodes that wait for the next round on behalf of a segment."""
    spares, waiting = (tally(nodes, _domain_of_waiting) for nodes in (state.redundancy_list, state.wait_list))
    return spares.get(domain, 0), waiting.get(domain, 0)


def without_partial_segments(before: State, after: State, gone: Sequence[NodeId], size: int) -> State:
    """The state without these nodes: a node that waited for a segment that is now incomplete is a spare again."""
    spares_gone = {before.redundancy_list[node].domain for node in gone if node in before.redundancy_list}
    for domain in spares_gone if after.wait_list else ():
        spares, waiting = _numbers_waiting(after, domain)
        too_many = waiting - (spares + waiting) // size
        nodes = [node for node, info in after.wait_list.items() if info.domain == domain] if too_many > 0 else []
        for node in nodes[:too_many]:
            after = after._replace(
                redundancy_list=with_entry(after.redundancy_list, node, after.wait_list[node]),
                wait_list=without(after.wait_list, node),
            )
    return after


def what_a_node_waits_for(state: State, domain: str, settings: Settings) -> str:
    """Why a node of this domain without a place is waiting; empty if it only waits for other nodes to join."""
    size = settings.segment
    if not state.complete:
        number, room = tally(state.participants, _domain_of).get(domain, 0), True
    else:
        spares, waiting = _numbers_waiting(state, domain)
        if waiting:
            return "the next round"
        number, room = spares, len(state.participants) + size * (len(state.wait_list) + 1) <= settings.max_nodes
    if not room:
        return "a place: all are taken"
    return f"no whole segment in its domain ({number} of {size} nodes)" if number < size else ""
