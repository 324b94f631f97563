"""What a feature may do in an agent, and how an agent gets its features. Cheap to import.

A feature is what a job may have beside the core: one file or folder of `rallypoint.features`, and one row of the table
there. The core names none: it reads the table, and calls what `Feature` offers. To see what a feature is, read its
folder; to take one out, delete it and the row.

Laws:

1. A feature is imported when its row says so, and no earlier: what nobody asked for costs nothing.
2. A handler of messages, a watcher and an observer cannot end the job: what they raise is logged, they are dropped or
   the message is, and the job continues.
3. A rule decides without touching: state and event in, a decision out. None leaves the event to the next feature, and
   at last to the policy's own table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from importlib import import_module

from rallypoint.agent.policy import PolicyState, Rules
from rallypoint.agent.sources import Keeper, Preparation, Source, guarded
from rallypoint.base.clock import Clock
from rallypoint.base.errors import UserError
from rallypoint.base.light_typing import TYPE_CHECKING, Any, NamedTuple
from rallypoint.base.log import get_logger

if TYPE_CHECKING:
    from rallypoint.agent.facts import WaitingProcess
    from rallypoint.agent.options import Features
    from rallypoint.agent.spec import VariableSource
    from rallypoint.agent.steps import Event, Step
    from rallypoint.agent.workers import WorkerController
    from rallypoint.base.http import Access, Handler
    from rallypoint.control.membership.state import NodeInfo
    from rallypoint.rendezvous.params import RendezvousParameters
    from rallypoint.workers.context import PContext, ProcessOptions

log = get_logger(__name__)

TABLE = "rallypoint.features.table"
"""The module that has the table, as `FEATURES`."""


class Load(Enum):
    """When a feature that was asked for is imported and made."""

    AT_START = auto()
    """Before the first event."""
    WHEN_PLACED = auto()
    """After the first look at all events in which the rendezvous says where commands find the job."""
    WHEN_STARTED = auto()
    """Once workers have been started: only what comes later needs it, and no worker waits for its imports."""
    WITH_FOLDER = auto()
    """Once workers have made the folder that they share with the agent: only then have they said anything of it."""
    ON_MESSAGE = auto()
    """With the first message of its row, whatever was asked for."""


def anybody(_options: Features) -> bool:
    """Nobody asks for the feature by an option: all have it, and do without it where it is not installed."""
    return True


class Row(NamedTuple):
    """One feature.

    Args:
        name: of its file or folder.
        place: its class, as `module:Class` below that folder, `:Class` in the file itself; empty without one.
        load: when it is made.
        wanted: whether these options ask for it.
        by_default: whether it is loaded without having been asked for too; then a job does without it where it is not
            installed.
        loaded_by: the names of the types of messages that load it where it is not there yet, whatever was asked for: a
            feature without an option, or one that answers for a node that does not use it.
    """

    name: str
    place: str = ""
    load: Load = Load.AT_START
    wanted: Callable[[Features], bool] = anybody
    by_default: bool = False
    loaded_by: tuple[str, ...] = ()
    example: str = ""
    """Flags that ask for it; empty for a feature that all have."""
    admits: str = ""
    """A function, as `place`, that is called with the launch's config and the parameters of its rendezvous before
    anything is started. It may add to the parameters; what it raises keeps this node out of the job."""
    serves: str = ""
    """A function, as `place`, that is called with the workers and the options of the rendezvous where the health check
    has a server; it returns what answers all other requests there, and who may ask."""


class Agent(NamedTuple):
    """What a feature may use of its agent.

    Args:
        workers: the controller of its workers, which knows the rendezvous.
        post: takes an event for the loop, from any thread.
        clock: of the loop.
        at_end: adds a text to the reason with which the job ends on this node; the end waits for it.
        find: another feature by its name, for one that makes use of it; None where this run does not have it.
    """

    workers: WorkerController
    post: Callable[[Event], None]
    clock: Clock
    at_end: Callable[[Callable[[], str]], None]
    find: Callable[[str], Any] = lambda _name: None


class Feature:
    """One feature in one agent. A subclass overrides what it needs; all is called on the loop's thread.

    Args:
        agent: the agent, which has not run yet unless the row says otherwise.

    Raises:
        UserError: what was asked for cannot be done here.
    """

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.workers = agent.workers

    def sources(self) -> Iterable[Source]:
        """What the loop waits for and drives."""
        return ()

    def watchers(self) -> Iterable[Source]:
        """The same of what only watches (law 2)."""
        return ()

    def preparations(self) -> Iterable[Preparation]:
        """What each round waits for before its workers start."""
        return ()

    def variables(self) -> Iterable[VariableSource]:
        """What adds variables to the environment of workers."""
        return ()

    def prepare(self) -> None:
        """The run begins: prepare what can be prepared while the nodes find each other. The reaper is there."""

    def on_reaper_closed(self) -> None:
        """The reaper is lost, or about to be closed: all that is below it ends."""

    def node_info(self, info: NodeInfo) -> NodeInfo:
        """What other nodes are told of this one when it requests a place."""
        return info

    def constants(self) -> Mapping[str, str]:
        """Variables that are the same for all workers in all rounds: workers may be forked from a process that has
        them.
        """
        return {}

    def before_start(self, context: PContext) -> None:
        """The processes of these workers are about to be started: their log folders exist, and their environment can
        still be changed.
        """

    def take_places(self, context: PContext) -> None:
        """Let processes that wait take the places of workers for which this context has no process yet."""

    def keeper(self) -> Keeper | None:
        """What keeps workers in their processes between rounds, if those of all local ranks can."""
        return None

    def holds_folder(self) -> bool:
        """Whether a process that waits for a place knows the folder that is shared with workers."""
        return False

    def processes(self) -> tuple[WaitingProcess, ...]:
        """Processes that wait for a place in a round, for reports."""
        return ()

    def process_options(self, options: ProcessOptions) -> ProcessOptions:
        """How the processes of workers are started."""
        return options

    def rules(self) -> Rules:
        """What follows from events, by their types (law 3)."""
        return {}

    def steps(self) -> Mapping[type, Callable[[Any], object]]:
        """What carries out the steps of its rules that are its own."""
        return {}

    def signals(self) -> Mapping[int, Callable[[int], Event]]:
        """Signals that this agent handles too, and the event that each of them is."""
        return {}

    def messages(self) -> Mapping[type, Callable[[Any], None]]:
        """What follows from a message besides what is decided."""
        return {}

    def observe(self, before: PolicyState, event: Event | None, after: PolicyState, steps: tuple[Step, ...]) -> None:
        """An event has been decided on, and the steps follow; None is the beginning of the run."""

    def figures(self) -> Mapping[str, float]:
        """Numbers that `rallyctl status --json` shows of this node, by names with underscores."""
        return {}

    def on_workers_gone(self) -> None:
        """No worker is left, and the control plane can still be told something."""

    def close(self) -> None:
        """Release everything: the run has ended."""

    def finish(self, error: BaseException | None) -> None:
        """The launch has ended: with this error, or without one. Only `launch_agent` calls it, and after `close`."""


class FeatureSet:
    """The features of one agent.

    Args:
        agent: the agent, whose spec says what was asked for.
        steps: what carries out the steps of rules, by type; extended by the features.
        handlers: what follows from events whatever is decided, by type; extended by the features.
    """

    def __init__(
        self,
        agent: Agent,
        steps: dict[type, Callable[[Any], object]],
        handlers: dict[type, list[Callable[[Any], object]]],
    ) -> None:
        options = agent.workers.group.spec.features
        self.rules: list[Rules] = []
        self.signals: dict[int, Callable[[int], Event]] = {}
        self._features: dict[str, Feature] = {}
        self._agent = agent._replace(find=self._features.get)
        self._steps = steps
        self._handlers = handlers
        self._waiting = [
            row
            for row in _rows()
            if row.place and row.load is not Load.ON_MESSAGE and (row.by_default or row.wanted(options))
        ]
        self._by_message: dict[str, list[Row]] = {}
        for row in _rows():
            for message in row.loaded_by:
                self._by_message.setdefault(message, []).append(row)

    def load(self, load: Load) -> None:
        """Make the features that are due at this moment. Raises UserError; at the start also what a feature raises."""
        due = [row for row in self._waiting if row.load is load]
        for row in due:
            self._waiting.remove(row)
            if load is Load.AT_START:
                self._add(row)
                continue
            # Workers may run by now. Where this process has no descriptor left, the import of a feature fails, and
            # that must not end the job (law 2).
            try:
                self._add(row)
            except UserError:
                raise
            except Exception as error:
                log.warning("the feature %r cannot be loaded, and the job continues without it: %s", row.name, error)

    def load_for(self, event: Event) -> None:
        """Make the features that are due with the first message of this type."""
        for row in self._by_message.pop(type(event).__name__, ()):
            if row.name not in self._features:
                self._waiting = [other for other in self._waiting if other is not row]
                guarded(f"the feature {row.name!r}", self._add, row)

    def finish(self, error: BaseException | None) -> None:
        """See `Feature.finish`; also of features that wait for a place which never came."""
        self.load(Load.WHEN_PLACED)
        for finish in self._agent.workers.hooks.finish:
            guarded("the end of a feature", finish, error)

    def _add(self, row: Row) -> None:
        workers = self._agent.workers
        try:
            made: Feature = part(row.name, row.place)(self._agent)
        except UserError:
            if row.wanted is anybody or not row.wanted(workers.group.spec.features):
                return
            raise
        self._features[row.name] = made
        workers.at_end.callback(made.close)
        workers.sources += made.sources()
        for watcher in made.watchers():
            workers.watchers.add(watcher)
            if workers.watchers not in workers.sources:  # not for nothing: the loop asks each source in each pass
                workers.sources.append(workers.watchers)
        for preparation in made.preparations():
            workers.add_preparation(preparation)
        workers.group.variable_sources += made.variables()
        workers.constants.update(made.constants())
        if type(made).observe is not Feature.observe:
            workers.watchers.observe_with(made.observe)
        self.rules.append(made.rules())
        self._steps |= made.steps()
        self.signals |= made.signals()
        for kind, handle in made.messages().items():
            self._handlers.setdefault(kind, []).append(workers.watchers.guard(handle))
        for name, methods in vars(workers.hooks).items():
            if getattr(type(made), name) is not getattr(Feature, name):
                methods.append(getattr(made, name))


def admit(config: Any, parameters: RendezvousParameters) -> None:
    """Call all features that have a say before a node joins. Raises what they raise: this node stays out of the job.

    Args:
        config: a `LaunchConfig`.
        parameters: of the rendezvous.
    """
    for row in _rows():
        if row.admits and row.wanted(config.features):
            part(row.name, row.admits)(config, parameters)


def served(workers: WorkerController, options: Mapping[str, Any]) -> tuple[Handler, Access]:
    """What the server of the health check answers besides, and who may ask."""
    row = next(row for row in _rows() if row.serves)
    found: tuple[Handler, Access] = part(row.name, row.serves)(workers, options)
    return found


def _rows() -> tuple[Row, ...]:
    rows: tuple[Row, ...] = import_module(TABLE).FEATURES
    return rows


def part(feature: str, place: str) -> Any:
    """A class or function of a feature, imported now.

    Args:
        feature: its name.
        place: see `Row.place`.

    Raises:
        UserError: this installation does not have it.
    """
    module, _, name = place.partition(":")
    home = TABLE.rpartition("table")[0]
    try:
        return getattr(import_module(f"{home}{feature}.{module}" if module else f"{home}{feature}"), name)
    except ModuleNotFoundError as error:
        absent = error.name or ""
        if not absent.startswith(home):
            raise
        missing = absent.removeprefix(home).partition(".")[0]  # or a feature that this one needs
        raise UserError(f"this installation does not have the feature {missing!r}; install Rallypoint whole") from None
