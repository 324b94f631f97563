"""Does what the election says that needs no waiting and no term: watches, news for the link, lines of the log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rallypoint.control.election import steps
from rallypoint.control.election.leader_resolver import LeaderResolver
from rallypoint.control.election.steps import Effect, Event, Watched
from rallypoint.control.etcd.api import WatchEnd, WatchEvent


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
    ) -> Any:
        """See `EtcdClient.watch`."""
        ...


class EffectRunner:
    """Effects of one candidate. What stands under the leader's key goes to the link at once, also while a request of
    the election is under way.
    """

    def __init__(
        self,
        watcher: Watcher,
        resolver: LeaderResolver,
        put: Callable[[Event], None],
        log: Callable[[steps.WriteLog], None],
    ) -> None:
        """`put` is called from any thread with events for the election, `log` with lines of the log."""
        self._watcher = watcher
        self._resolver = resolver
        self._put = put
        self._log = log
        self._watches: dict[Watched, Any] = {}

    def do(self, effect: Effect) -> None:
        """Do any effect but a request and `NodesLost`."""
        match effect:
            case steps.WatchKeys():
                self._watch(effect)
            case steps.EndWatch(kind):
                if (watch := self._watches.pop(kind, None)) is not None:  # else it could not be begun
                    watch.close()
            case steps.Publish(kvs, revision):
                self._resolver.learn(kvs, revision)
            case steps.ResetRevision():
                self._resolver.reset_revision()
            case steps.PermanentError(sentence):
                self._resolver.set_permanent_error(sentence)
            case steps.EtcdTrouble(sentence):
                self._resolver.trouble = sentence
            case steps.WriteLog():
                self._log(effect)
            case _:
                raise AssertionError(f"{effect} is the shell's")

    def _watch(self, effect: steps.WatchKeys) -> None:
        def on_events(events: Sequence[WatchEvent]) -> None:
            if effect.kind is Watched.LEADER:
                for each in events:
                    if each.kind == "put":
                        self._resolver.learn([each.kv], each.kv.mod_revision)
            self._put(steps.Changed(effect.number, tuple(events)))

        def on_lost(lost: WatchEnd) -> None:
            self._put(steps.Unwatched(effect.number, lost))

        self._watches[effect.kind] = self._watcher.watch(
            effect.key, effect.revision, on_events, on_lost, prefix=effect.prefix
        )
