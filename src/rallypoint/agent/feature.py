"""The interface of features in an agent, and how an agent loads them. Cheap to import.

A feature is an optional part beside the core: one file or folder in `rallypoint.features`, and one row in the table
there. The core names no feature: it reads the table, and calls the methods of `Feature`. To understand a feature, read
its folder; to remove one, delete the folder and the row.

Laws:

1. A feature is imported when its row says so, no earlier: an unused feature costs nothing.
2. Message handlers, watchers and observers cannot end the job. If one raises, the exception is logged, the watcher,
   observer or message is dropped, and the job continues.
3. A rule decides without side effects: state and event in, a decision out. If it returns None, the event goes to the
   next feature, and finally to the policy's own table.
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
"""Module that contains the table, `FEATURES`."""


class Load(Enum):
    """When to import and create a feature that the options enable."""

    AT_START = auto()
    """Before the first event."""
    WHEN_PLACED = auto()
    """After the first pass over all events in which the rendezvous reports where commands find the job."""
    WHEN_STARTED = auto()
    """After workers start: only later events need the feature, and no worker waits for its imports."""
    WITH_FOLDER = auto()
    """After workers create the folder that they share with the agent: until then the feature has nothing to read."""
    ON_MESSAGE = auto()
    """With the first message listed in its row, whatever the options."""


def anybody(_options: Features) -> bool:
    """Enable a feature that has no option: all jobs use it, and run without it if it is not installed."""
    return True


class Row(NamedTuple):
    """One feature.

    Args:
        name: the name of its file or folder.
        place: its class, as `module:Class` below that folder, or `:Class` in the file itself; empty without a class.
        load: when to create it.
        wanted: whether these options enable it.
        by_default: whether to load it even if no option enables it; the job then runs without it if it is not
            installed.
        loaded_by: names of the message types that load it if it is not loaded yet, whatever the options. For features
            without an option, or features that answer for a node that does not use them.
    """

    name: str
    place: str = ""
    load: Load = Load.AT_START
    wanted: Callable[[Features], bool] = anybody
    by_default: bool = False
    loaded_by: tuple[str, ...] = ()
    example: str = ""
    """Flags that enable it; empty for a feature that all jobs use."""
    admits: str = ""
    """Function, named like `place`, to call before anything starts, with the launch's config and its rendezvous's
    parameters. It may add parameters; if it raises, this node stays out of the job."""
    serves: str = ""
    """Function, named like `place`, to call with the workers and the options of the rendezvous if the health check runs
    a server. Returns the handler of all other requests to that server, and who may send them."""


class Agent(NamedTuple):
    """The parts of an agent that its features may use.

    Args:
        workers: the controller of its workers, which knows the rendezvous.
        post: passes an event to the loop, from any thread.
        clock: the loop's clock.
        at_end: adds a text to the reason why the job ends on this node; the end waits for it.
        find: returns another feature by name; None if this run did not load it.
    """

    workers: WorkerController
    post: Callable[[Event], None]
    clock: Clock
    at_end: Callable[[Callable[[], str]], None]
    find: Callable[[str], Any] = lambda _name: None


class Feature:
    """One feature in one agent. A subclass overrides what it needs; all methods are called on the loop's thread.

    Args:
        agent: the agent, which is not running yet unless the row says otherwise.

    Raises:
        UserError: this machine cannot provide what the options request.
    """

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.workers = agent.workers

    def sources(self) -> Iterable[Source]:
        """Sources that the loop waits for and drives."""
        return ()

    def watchers(self) -> Iterable[Source]:
        """Sources that only watch (law 2)."""
        return ()

    def preparations(self) -> Iterable[Preparation]:
        """Work that each round waits for before its workers start."""
        return ()

    def variables(self) -> Iterable[VariableSource]:
        """Sources of additional variables in the environment of workers."""
        return ()

    def prepare(self) -> None:
        """Prepare, at the start of the run, what is possible while the nodes find each other. The reaper exists."""

    def on_reaper_closed(self) -> None:
        """Clean up: the reaper is lost or about to be closed, and everything below it ends."""

    def node_info(self, info: NodeInfo) -> NodeInfo:
        """Change the information about this node that others receive when it requests a place."""
        return info

    def constants(self) -> Mapping[str, str]:
        """Variables that are the same for all workers in all rounds. A process from which workers are forked may also
        have them."""
        return {}

    def before_start(self, context: PContext) -> None:
        """Prepare workers whose processes are about to start: their log folders exist, and their environment can still
        be changed."""

    def take_places(self, context: PContext) -> None:
        """Let waiting processes take the places of workers that do not have a process in this context yet."""

    def keeper(self) -> Keeper | None:
        """The keeper of workers' processes between rounds, if it can keep those of all local ranks."""
        return None

    def holds_folder(self) -> bool:
        """Whether a process that is waiting for a place knows the folder shared with workers."""
        return False

    def processes(self) -> tuple[WaitingProcess, ...]:
        """Processes that are waiting for a place in a round, for reports."""
        return ()

    def process_options(self, options: ProcessOptions) -> ProcessOptions:
        """Change how worker processes are started."""
        return options

    def rules(self) -> Rules:
        """Rules for events, by event type (law 3)."""
        return {}

    def steps(self) -> Mapping[type, Callable[[Any], object]]:
        """Functions that carry out the steps of its own rules."""
        return {}

    def signals(self) -> Mapping[int, Callable[[int], Event]]:
        """Additional signals that this agent handles, and the event for each of them."""
        return {}

    def messages(self) -> Mapping[type, Callable[[Any], None]]:
        """Message handlers, called whatever the policy decides."""
        return {}

    def observe(self, before: PolicyState, event: Event | None, after: PolicyState, steps: tuple[Step, ...]) -> None:
        """Observe the policy's decision on an event, before its steps are taken; None is the start of the run."""

    def figures(self) -> Mapping[str, float]:
        """Numbers for `rallyctl status --json` about this node, by names with underscores."""
        return {}

    def on_workers_gone(self) -> None:
        """React when no worker is left; the control plane can still receive messages."""

    def close(self) -> None:
        """Release everything at the end of the run."""

    def finish(self, error: BaseException | None) -> None:
        """Finish the launch, which ended with this error or with none. Only `launch_agent` calls it after `close`."""


class FeatureSet:
    """The features of one agent.

    Args:
        agent: the agent; its spec contains the options.
        steps: functions that carry out the steps of rules, by type; features add theirs.
        handlers: functions to call for events whatever the policy decides, by type; features add theirs.
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
        """Create the features that are due now. Raises UserError; at the start also a feature's own error."""
        due = [row for row in self._waiting if row.load is load]
        for row in due:
            self._waiting.remove(row)
            if load is Load.AT_START:
                self._add(row)
                continue
            # Workers might be running. If this process has run out of descriptors, importing a feature fails, which
            # must not end the job (law 2).
            try:
                self._add(row)
            except UserError:
                raise
            except Exception as error:
                log.warning("the feature %r cannot be loaded; the job continues without it: %s", row.name, error)

    def load_for(self, event: Event) -> None:
        """Create the features that are due with the first message of this type."""
        for row in self._by_message.pop(type(event).__name__, ()):
            if row.name not in self._features:
                self._waiting = [other for other in self._waiting if other is not row]
                guarded(f"the feature {row.name!r}", self._add, row)

    def finish(self, error: BaseException | None) -> None:
        """Finish all features (`Feature.finish`), including those that wait for a place which never came."""
        self.load(Load.WHEN_PLACED)
        for finish in self._agent.workers.hooks.finish:
            guarded("closing a feature", finish, error)

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
            if workers.watchers not in workers.sources:  # only if needed: the loop asks each source in each pass
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
    """Call all features that check a node before it joins. If a check raises, this node stays out of the job.

    Args:
        config: a `LaunchConfig`.
        parameters: the parameters of the rendezvous.
    """
    for row in _rows():
        if row.admits and row.wanted(config.features):
            part(row.name, row.admits)(config, parameters)


def served(workers: WorkerController, options: Mapping[str, Any]) -> tuple[Handler, Access]:
    """Handler of other requests to the health check's server, and who may send them."""
    row = next(row for row in _rows() if row.serves)
    found: tuple[Handler, Access] = part(row.name, row.serves)(workers, options)
    return found


def _rows() -> tuple[Row, ...]:
    rows: tuple[Row, ...] = import_module(TABLE).FEATURES
    return rows


def part(feature: str, place: str) -> Any:
    """Import a class or function of a feature.

    Args:
        feature: its name.
        place: see `Row.place`.

    Raises:
        UserError: this installation does not include it.
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
        raise UserError(
            f"this installation does not include the feature {missing!r}; install the complete package"
        ) from None
