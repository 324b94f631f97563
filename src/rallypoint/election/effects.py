"""Does what the election says that needs no waiting: watches, the link's news, the term's losses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from rallypoint.election import steps
from rallypoint.election.leader_resolver import LeaderResolver
from rallypoint.election.steps import Effect, Event, Watched
from rallypoint.etcd.api import WatchEnd, WatchEvent
from rallypoint.membership.state import NodeId


class Closable(Protocol):
    """A watch that is on."""

    def close(self) -> None:
        """Begin no more callbacks."""
        ...


class Watcher(Protocol):
    """A client of etcd, as far as it watches."""

    def watch(
        self,
        key: bytes,
        from_revision: int,
        on_events: Callable[[Sequence[WatchEvent]], None],
        on_lost: Callable[[WatchEnd], None],
        *,
        prefix: bool = True,
    ) -> Closable:
        """See `EtcdClient.watch`."""
        ...


class RunningTerm(Protocol):
    """A term that is on."""

    def nodes_lost(self, nodes: Collection[NodeId], detail: str) -> None:
        """These nodes are no more, as others know from what `detail` says."""
        ...


class EffectRunner:
    """Effects of one candidate.

    What stands under the leader's key goes to the link at once, also while a request of the election is under way.
    """

    def __init__(
        self,
        watcher: Watcher,
        address: LeaderResolver,
        put: Callable[[Event], None],
        log: Callable[[steps.WriteLog], None],
    ) -> None:
        """`put` is called from any thread with events for the election, `log` with lines of the log."""
        self.term: RunningTerm | None = None
        """The term that is on, if there is one."""
        self._watcher = watcher
        self._address = address
        self._put = put
        self._log = log
        self._watches: dict[Watched, Closable] = {}

    def do(self, effect: Effect) -> None:
        """Do any effect but a request."""
        self._HOW[type(effect)](self, effect)

    def _watch(self, effect: steps.WatchKeys) -> None:
        def on_events(events: Sequence[WatchEvent]) -> None:
            if effect.kind is Watched.LEADER:
                for each in events:
                    if each.kind == "put":
                        self._address.learn([each.kv], each.kv.mod_revision)
            self._put(steps.Changed(effect.number, tuple(events)))

        def on_lost(lost: WatchEnd) -> None:
            self._put(steps.Unwatched(effect.number, lost))

        self._watches[effect.kind] = self._watcher.watch(
            effect.key, effect.revision, on_events, on_lost, prefix=effect.prefix
        )

    def _unwatch(self, effect: steps.EndWatch) -> None:
        watch = self._watches.pop(effect.kind, None)
        if watch is not None:  # else it could not be begun
            watch.close()

    def _publish(self, effect: steps.Publish) -> None:
        self._address.learn(effect.kvs, effect.revision)

    def _reset_revision(self, _effect: steps.ResetRevision) -> None:
        self._address.reset_revision()

    def _set_hopeless(self, effect: steps.PermanentError) -> None:
        self._address.set_permanent_error(effect.sentence)

    def _set_trouble(self, effect: steps.EtcdTrouble) -> None:
        self._address.trouble = effect.sentence

    def _lose(self, effect: steps.NodesLost) -> None:
        if self.term is not None:
            self.term.nodes_lost(effect.nodes, effect.detail)

    def _write_log(self, effect: steps.WriteLog) -> None:
        self._log(effect)

    _HOW: dict[type[Effect], Callable[[EffectRunner, Any], None]] = {  # noqa: RUF012 - a table, never changed
        steps.WatchKeys: _watch,
        steps.EndWatch: _unwatch,
        steps.Publish: _publish,
        steps.ResetRevision: _reset_revision,
        steps.PermanentError: _set_hopeless,
        steps.EtcdTrouble: _set_trouble,
        steps.NodesLost: _lose,
        steps.WriteLog: _write_log,
    }
