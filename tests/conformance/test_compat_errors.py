"""Refusals raise exceptions that code written for torch catches: the same types as torch's."""

from __future__ import annotations

import pickle
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rallypoint.base.errors import UserError
from tests.conformance.test_compat import module_of_ours, module_of_torch
from tests.conformance.test_compat_instances import Made, names_in

pytestmark = pytest.mark.torch

AGENT = "distributed.elastic.agent.server.api"
PROCESSES = "distributed.elastic.multiprocessing.api"
STARTS = "distributed.elastic.multiprocessing"
ERRORS = "distributed.elastic.multiprocessing.errors"
MEETING = "distributed.elastic.rendezvous.api"
DYNAMIC = "distributed.elastic.rendezvous.dynamic_rendezvous"
C10D = "distributed.elastic.rendezvous.c10d_rendezvous_backend"
STATIC = "distributed.elastic.rendezvous.static_tcp_rendezvous"
REGISTRY = "distributed.elastic.rendezvous.registry"
TIMER = "distributed.elastic.timer"
EVENTS = "distributed.elastic.events"
UTILS = "distributed.elastic.utils"
STORES = "distributed.elastic.utils.distributed"
DATA = "distributed.elastic.utils.data"
LAUNCHER = "distributed.launcher.api"
RUN = "distributed.run"
DIST = "distributed"

ONE = "{0: ()}, {0: {}}, DefaultLogsSpecs(folder)"
"""Arguments, environment and logs of one worker."""

PARAMS = "RendezvousParameters('c10d', 'localhost:0', 'j', 1, 1, "

CASES = [
    Made(AGENT, "WorkerSpec('r', 0, None, entrypoint=print)"),
    Made(AGENT, "WorkerSpec('r', 1, None, entrypoint=print, monitor_interval=0)"),
    Made(AGENT, "WorkerSpec('r', 1, None)"),
    Made(AGENT, "WorkerSpec('r', 1, None, entrypoint='')"),
    Made(STARTS, f"start_processes('n', '/nowhere', {ONE})"),
    Made(STARTS, f"start_processes('n', 'there-is-no-such-program', {ONE})"),
    Made(STARTS, f"start_processes('n', folder, {ONE})"),
    Made(STARTS, f"start_processes('n', text, {ONE})"),
    Made(STARTS, f"start_processes('n', text + '/below', {ONE})"),
    Made(STARTS, f"start_processes('n', program, {ONE})"),
    Made(STARTS, "start_processes('n', 'true', {0: ('a\\0b',)}, {0: {}}, DefaultLogsSpecs(folder))"),
    Made(STARTS, "start_processes('n', 'true', {0: ('x' * 4000000,)}, {0: {}}, DefaultLogsSpecs(folder))"),
    Made(STARTS, "start_processes('n', 'true', {0: ()}, {0: {'A=B': ''}}, DefaultLogsSpecs(folder))"),
    Made(STARTS, "start_processes('n', 'true', {1: ()}, {1: {}}, DefaultLogsSpecs(folder))"),
    Made(STARTS, "start_processes('n', 'true', {0: ()}, {}, DefaultLogsSpecs(folder))"),
    Made(STARTS, "start_processes('n', print, {0: ()}, {1: {}}, DefaultLogsSpecs(folder))"),
    Made(STARTS, f"start_processes('n', print, {ONE}, start_method='teleport')"),
    Made(STARTS, f"start_processes('n', lambda: None, {ONE})"),
    Made(STARTS, "start_processes('n', print, {0: (lock,)}, {0: {}}, DefaultLogsSpecs(folder))"),
    Made(STARTS, "start_processes('n', 'true', {0: ()}, {0: {}}, DefaultLogsSpecs(forbidden))"),
    Made(PROCESSES, "DefaultLogsSpecs(text)"),
    Made(PROCESSES, "DefaultLogsSpecs(text + '/below').reify({0: {}})"),
    Made(PROCESSES, "Std.from_str('7')"),
    Made(PROCESSES, "Std.from_str('0:7')"),
    Made(PROCESSES, "to_map('x', 'y')"),
    Made(ERRORS, "ChildFailedError('n', {})"),
    Made(MEETING, "RendezvousParameters('', '', 'j', 1, 1)"),
    Made(MEETING, "RendezvousParameters('b', '', 'j', 0, 1)"),
    Made(MEETING, "RendezvousParameters('b', '', 'j', 2, 1)"),
    Made(MEETING, f"{PARAMS} a='x').get_as_int('a')"),
    Made(MEETING, f"{PARAMS} a='x').get_as_bool('a')"),
    Made(MEETING, f"{PARAMS} a=2).get_as_bool('a')"),
    Made(MEETING, "RendezvousHandlerRegistry().register('', print)"),
    Made(MEETING, "registered('b', print).register('b', len)"),
    Made(MEETING, "RendezvousHandlerRegistry().create_handler(RendezvousParameters('b', '', 'j', 1, 1))"),
    Made(MEETING, "registered('b', lambda params: Other()).create_handler(RendezvousParameters('b', '', 'j', 1, 1))"),
    Made(REGISTRY, "get_rendezvous_handler(RendezvousParameters('zoo', '', 'j', 1, 1))"),
    Made(REGISTRY, "get_rendezvous_handler(RendezvousParameters('c10d', '', 'j', 1, 1, store_type='zoo'))"),
    Made(REGISTRY, "get_rendezvous_handler(RendezvousParameters('static', '', 'j', 1, 1))"),
    Made(REGISTRY, "get_rendezvous_handler(RendezvousParameters('static', '', 'j', 1, 1, rank=0))"),
    Made(REGISTRY, "get_rendezvous_handler(RendezvousParameters('static', 'h', 'j', 1, 1, rank=0))"),
    Made(REGISTRY, f"get_rendezvous_handler({PARAMS} read_timeout=0))"),
    Made(REGISTRY, f"get_rendezvous_handler({PARAMS} join_timeout=0))"),
    Made(REGISTRY, f"get_rendezvous_handler({PARAMS} join_timeout='x'))"),
    Made(REGISTRY, "get_rendezvous_handler(RendezvousParameters('c10d', 'a b:1', 'j', 1, 1))"),
    Made(REGISTRY, "get_rendezvous_handler(RendezvousParameters('c10d', 'h:x', 'j', 1, 1))"),
    Made(REGISTRY, "get_rendezvous_handler(RendezvousParameters('c10d', 'localhost:0', '', 1, 1))"),
    Made(C10D, "C10dRendezvousBackend(HashStore(), '')"),
    Made(C10D, "create_backend(RendezvousParameters('c10d', '', 'j', 1, 1, store_type='zoo'))"),
    Made(C10D, "create_backend(RendezvousParameters('c10d', '', 'j', 1, 1, read_timeout=-1))"),
    Made(DYNAMIC, "RendezvousTimeout(join=timedelta(0))"),
    Made(DYNAMIC, "DynamicRendezvousHandler.from_backend('', HashStore(), Backend(), 1, 1)"),
    Made(DYNAMIC, "DynamicRendezvousHandler.from_backend('j', HashStore(), Backend(), 0, 1)"),
    Made(DYNAMIC, "DynamicRendezvousHandler.from_backend('j', HashStore(), Backend(), 2, 1)"),
    Made(DYNAMIC, f"create_handler(HashStore(), Backend(), {PARAMS} join_timeout=0))"),
    Made(DYNAMIC, f"create_handler(HashStore(), Backend(), {PARAMS} keep_alive_interval='x'))"),
    Made(STATIC, "create_rdzv_handler(RendezvousParameters('static', 'h:1', 'j', 1, 1))"),
    Made(STATIC, "create_rdzv_handler(RendezvousParameters('static', '', 'j', 1, 1, rank=0))"),
    Made(STATIC, "create_rdzv_handler(RendezvousParameters('static', 'h', 'j', 1, 1, rank=0))"),
    Made(TIMER, "expires(1).__enter__()"),
    Made(TIMER, "FileTimerClient(text + '.pipe').acquire('s', 1)"),
    Made(TIMER, "FileTimerServer(text + '/below', 'r').start()"),
    Made(EVENTS, "get_logging_handler('zoo')"),
    Made(EVENTS, "record(Event('n', EventSource.AGENT), 'zoo')"),
    Made(EVENTS, "Event.deserialize('no JSON')"),
    Made(EVENTS, "Event.deserialize('{\"name\": 1}')"),
    Made(EVENTS, 'Event.deserialize(\'{"source": "MOON"}\')'),
    Made(EVENTS, 'Event.deserialize(\'{"source": "AGENT", "zoo": 1}\')'),
    Made(EVENTS, "RdzvEvent.deserialize('no JSON')"),
    Made(EVENTS, "RdzvEvent.deserialize('{}')"),
    Made(EVENTS, 'RdzvEvent.deserialize(\'{"node_state": "MOON"}\')'),
    Made(UTILS, "get_env_variable_or_raise('THERE_IS_NO_SUCH_VARIABLE')"),
    Made("distributed.elastic.rendezvous.utils", "parse_rendezvous_endpoint('h:70000', 1)"),
    Made("distributed.elastic.rendezvous.utils", "parse_rendezvous_endpoint('a b', 1)"),
    Made("distributed.elastic.rendezvous.utils", "parse_rendezvous_endpoint(':1', 1)"),
    Made(STORES, "create_c10d_store(False, 'localhost', world_size=2)"),
    Made(STORES, "create_c10d_store(False, 'localhost', 1, timeout=0.1)"),
    Made(DATA, "ElasticDistributedSampler(range(5), 2, 1, 7)"),
    Made(DATA, "ElasticDistributedSampler(range(5), 2, 2)"),
    Made(DATA, "ElasticDistributedSampler(range(5), 2, -1)"),
    Made(DATA, "ElasticDistributedSampler(iter([1]), 2, 1)"),
    Made(DATA, "ElasticDistributedSampler(range(5))"),
    Made(DATA, "next(iter(CyclingIterator(0, lambda epoch: iter([]))))"),
    Made(LAUNCHER, "LaunchConfig(1, 1, 1, shutdown_timeout=-1)"),
    Made(LAUNCHER, "launched(None)"),
    Made(LAUNCHER, "launched('/nowhere')"),
    Made(LAUNCHER, "launched(print, nproc_per_node=0)"),
    Made(LAUNCHER, "launched(print, min_nodes=0)"),
    Made(LAUNCHER, "launched(print, max_nodes=0)"),
    Made(LAUNCHER, "launched(print, rdzv_backend='zoo')"),
    Made(LAUNCHER, "launched(print, rdzv_backend='static', rdzv_endpoint='')"),
    Made(LAUNCHER, "launched(print, rdzv_backend='static', rdzv_endpoint='h', rdzv_configs={'rank': 0})"),
    Made(LAUNCHER, "launched(print, start_method='teleport')"),
    Made(LAUNCHER, "launched(print, monitor_interval=0)"),
    Made(LAUNCHER, "launched(lambda: None)"),
    Made(LAUNCHER, "launched('true', event_log_handler='zoo')"),
    Made(RUN, "parse_min_max_nnodes('1:2:3')"),
    Made(RUN, "parse_min_max_nnodes('x')"),
    Made(RUN, "determine_local_world_size('x')"),
    Made(RUN, "determine_local_world_size('gpu')"),
    Made(RUN, "determine_local_world_size('xpu')"),
    Made(RUN, "config_from_args(parse_args(['--nnodes=0', 'x.py']))"),
    Made(RUN, "config_from_args(parse_args(['--nnodes=2:1', 'x.py']))"),
    Made(RUN, "config_from_args(parse_args(['--max-restarts=-1', 'x.py']))"),
    Made(RUN, "config_from_args(parse_args(['--local-ranks-filter=x', 'x.py']))"),
    Made(RUN, "config_from_args(parse_args(['--logs-specs=zoo', 'x.py']))"),
    Made(RUN, "config_from_args(parse_args(['--rdzv-conf=a', 'x.py']))"),
    Made(RUN, "config_from_args(parse_args(['-r', '7', 'x.py']))"),
    Made(RUN, "config_from_args(parse_args(['--module', '--no-python', 'x.py']))"),
    Made(RUN, "config_from_args(parse_args(['--log-dir', text, 'x.py']))"),
    Made(RUN, "config_from_args(parse_args(['--numa-binding=zoo', 'x.py']))"),
    Made("distributed.launch", "launch(parse_args(['--no-python', 'x.py']))"),
    Made("numa.binding", "AffinityMode('zoo')"),
    Made("distributed.elastic.agent.server.health_check_server", "create_healthcheck_server()"),
]


def launched(module: Any, entrypoint: object, **changes: Any) -> object:
    """A launch of one node with some changes."""
    given = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": 1,
        "run_id": "j",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "max_restarts": 0,
    }
    return module.elastic_launch(module.LaunchConfig(**{**given, **changes}), entrypoint)()


def names(case: Made, module: Any, root: Any, folder: Path) -> dict[str, Any]:
    """What an expression may use beside the names of its module."""
    meeting = root(MEETING)
    text, program, forbidden = folder / "text", folder / "program", "/proc/forbidden"
    text.write_text("text\n")
    program.write_text("no program\n")
    program.chmod(0o755)

    def registered(name: str, creator: object) -> Any:
        registry = meeting.RendezvousHandlerRegistry()
        registry.register(name, creator)
        return registry

    class Other:
        def get_backend(self) -> str:
            return "other"

    class Backend(root(DYNAMIC).RendezvousBackend):  # type: ignore[misc]
        name = "mine"

        def get_state(self) -> None:
            return None

        def set_state(self, state: bytes, token: object = None) -> None:
            return None

    return {
        **names_in(meeting, case.expression),
        "HashStore": root(DIST).HashStore,
        "timedelta": timedelta,
        **names_in(module, case.expression),
        "folder": str(folder / "logs"),
        "text": str(text),
        "program": str(program),
        "forbidden": forbidden,
        "lock": threading.Lock(),
        "registered": registered,
        "Other": Other,
        "Backend": Backend,
        "launched": lambda *args, **more: launched(module, *args, **more),
    }


def raised(case: Made, root: Any, folder: Path) -> BaseException | None:
    """What an expression raises."""
    folder.mkdir()
    module = root(case.module)
    try:
        eval(case.expression, names(case, module, root, folder))
    except Exception as error:
        return error
    except SystemExit as leave:
        return leave
    return None


NO_KINDS = (Exception, BaseException, object)


def kinds(error: BaseException) -> set[str]:
    """The kinds of Python's own that an exception is of."""
    own = ("builtins", "pickle", "_pickle", "json.decoder")
    return {each.__name__ for each in type(error).__mro__ if each.__module__ in own and each not in NO_KINDS}


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Torch's leave handlers of signals, and both a variable."""
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.expression[:90]}")
def test_what_torch_refuses_is_refused_in_kind(case: Made, tmp_path: Path) -> None:
    theirs = raised(case, module_of_torch, tmp_path / "theirs")
    assert theirs is not None, "torch takes it"
    ours = raised(case, module_of_ours, tmp_path / "ours")
    assert ours is not None, f"torch raises {theirs!r}"
    assert kinds(ours) >= kinds(theirs), repr(theirs)
    if isinstance(ours, UserError):
        again = pickle.loads(pickle.dumps(ours))
        assert (type(again), str(again)) == (type(ours), str(ours))
        assert " " in str(ours), "a sentence"
