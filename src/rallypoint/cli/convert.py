"""Converts `Options` to the launcher's input: a `LaunchConfig`, an entry point and its arguments.

If a message names the flag, its check is here (contract section 1.13); lower layers check the rest.

torchrun silently ignores unknown names (keys in `--rdzv-conf`, `PET_*` variables). The contract requires us to ignore
them too, but we warn. We also warn about variables that resemble ours: with a misspelt `RALLYPOINT_SECRET`, a job would
run unprotected.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, MutableMapping

from rallypoint.agent.launch import LaunchConfig
from rallypoint.agent.options import Features, PreemptionOptions, ToolOptions, TopologyOptions
from rallypoint.base.endpoint import parse_endpoint
from rallypoint.base.errors import UsageError, UserError, naming, user_error
from rallypoint.base.light_typing import TYPE_CHECKING, Any, NamedTuple
from rallypoint.base.log import get_logger
from rallypoint.base.signals import signal_name, signal_number
from rallypoint.cli.flags import FLAGS
from rallypoint.cli.parse import Options, parse_nnodes
from rallypoint.control.protocol.ranges import is_in_range, range_of
from rallypoint.rendezvous.params import BACKENDS, C10D_PORT, ON_ETCD, parse_rdzv_conf
from rallypoint.workers.logs.specs import TEMPLATE_VARIABLE, host_label, with_host

if TYPE_CHECKING:
    from rallypoint.base.numa import NumaOptions
    from rallypoint.workers.logs.specs import LogsSpecs, Std

_log = get_logger(__name__)

_UNCATCHABLE = frozenset({signal.SIGKILL, signal.SIGSTOP})


STATIC_PORT = 29500

_RESERVED = ("backend", "endpoint", "run_id", "min_nodes", "max_nodes", "local_addr")
"""Options that only the launcher itself sets."""

_OF_SEVERAL_NODES = {
    *("nnodes", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "node_rank", "master_addr", "master_port", "segment"),
}
"""Options for jobs with several nodes, which may contradict other options."""

_ENVIRONMENTS = ("VIRTUAL_ENV", "CONDA_PREFIX", "UV_PROJECT_ENVIRONMENT")
"""Variables that may name an environment other than the launcher's."""
_FEW_HAVE = {"nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "standalone", "max_restarts"}
_OF_LAUNCHERS = frozenset(name for flag in FLAGS if flag.dest in _FEW_HAVE for name in flag.spellings)
"""Spellings of flags that are rare in scripts."""

EntryPoint = str | Callable[..., None]


def config_from_options(
    options: Options, environ: Mapping[str, str]
) -> tuple[LaunchConfig, EntryPoint, tuple[str, ...]]:
    """The configuration, the program or function to run, and its arguments, which still contain `${local_rank}`.
    Raises UserError: a value cannot work.
    """
    late = next((word for word in options.training_script_args if word.partition("=")[0] in _OF_LAUNCHERS), "")
    if late or not _OF_SEVERAL_NODES.isdisjoint(options.sources) or set("$`").intersection(str(options.flat())):
        from rallypoint.cli.consistency import consistent

        options = consistent(options, late)
    low, high = parse_nnodes(options.nnodes, options.source("nnodes"))
    own = _check(options, environ)
    program, arguments = entry_point(options, environ)
    choice = choose_rendezvous(options, high)
    size = local_world_size(options.nproc_per_node, environ, options.source("nproc_per_node"))
    _log.info("workers on this node: %d (--nproc-per-node=%s)", size, options.nproc_per_node)
    _check_devices(options, environ, size)
    if size > 1:
        from rallypoint.cli.sharing import warn_of_sharing

        warn_of_sharing(size, environ, each_gets_one=options.virtual_local_rank)
    _check_event_handler(options)
    host = host_label(own.command.host_prefix, environ)
    config = LaunchConfig(
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=size,
        logs_specs=_logs_specs(options),
        run_id=choice.run_id,
        role=options.role,
        rdzv_endpoint=choice.endpoint,
        rdzv_backend=choice.backend,
        rdzv_configs=choice.configs,
        max_restarts=int(options.max_restarts),
        monitor_interval=options.monitor_interval,
        start_method=options.start_method,
        log_line_prefix_template=with_host(options.log_line_prefix_template or environ.get(TEMPLATE_VARIABLE), host),
        local_addr=options.local_addr,
        event_log_handler=options.event_log_handler,
        numa_options=_numa_options(options, environ, size),
        signals_to_handle=options.signals_to_handle,
        duplicate_stdout_filters=list(options.duplicate_stdout_filters),
        duplicate_stderr_filters=list(options.duplicate_stderr_filters),
        virtual_local_rank=options.virtual_local_rank,
        shutdown_timeout=options.shutdown_timeout,
        node_rank=choice.node_rank,
        endpoint_flag=choice.endpoint_flag,
        endpoint_given=choice.endpoint_given,
        features=own,
    )
    return config, program, arguments


def _check(options: Options, environ: Mapping[str, str]) -> Features:
    """Check each value as far as possible. Returns the options beyond torchrun's, with absolute paths."""
    _check_bounds(options)
    _check_signals(options)
    own = options.features
    if own != Features():
        own = checked(options, environ)
    _check_backend(options)
    return own


def entry_point(options: Options, environ: Mapping[str, str]) -> tuple[EntryPoint, tuple[str, ...]]:
    """The program or function that each worker runs, and its arguments (contract section 1.7). Raises UserError:
    `--no-python` was combined with `--module`.
    """
    script, arguments = options.training_script, options.training_script_args
    if options.run_path:
        from rallypoint.workers.functions.worker import run_script_path

        return run_script_path, (script, *arguments)
    if options.no_python:
        if options.module:
            no_python, module = options.source("no_python"), options.source("module")
            raise UserError(f"{no_python} runs a program, but {module} runs a Python module; use only one of them")
        return script, arguments
    python = environ.get("PYTHON_EXEC")
    if python is None:
        python = sys.executable
        if any(environ.get(name, sys.prefix) != sys.prefix for name in _ENVIRONMENTS):
            from rallypoint.cli.worker_python import worker_python

            python = worker_python(environ)
    module_flag = ("-m",) if options.module else ()
    return python, ("-u", *module_flag, script, *arguments)


def check_script(options: Options, environ: Mapping[str, str]) -> None:
    """Raise UserError if the script does not exist. Does not check arguments of another interpreter, macros or
    `python -m`.
    """
    script = options.training_script
    elsewhere = options.module or options.no_python or "PYTHON_EXEC" in environ
    if elsewhere or "$" in script or script.startswith("-") or os.path.exists(script):
        return
    folder, name = os.path.split(os.path.abspath(script))
    try:
        # Compare without the suffix, which would make any two short names similar.
        stems = [name.removesuffix(".py") for name in os.listdir(folder) if name.endswith(".py")]
        from rallypoint.cli.similar_names import closest_match

        similar = closest_match(name.removesuffix(".py"), stems)
    except OSError:
        similar = ""
    raise UserError(
        f"the script {name} does not exist in {folder}; "
        f"{f'did you mean {similar}.py?' if similar else 'check the path'}"
    )


def limit_threads(config: LaunchConfig, environ: MutableMapping[str, str]) -> None:
    """Set one OpenMP thread per worker if there are several, unless the user set a number (contract section 1.10)."""
    if config.nproc_per_node < 2 or "OMP_NUM_THREADS" in environ:
        return
    environ["OMP_NUM_THREADS"] = "1"
    _log.warning(
        "OMP_NUM_THREADS is not set, so each of the %d workers gets OMP_NUM_THREADS=1; set it to suit your program "
        "(processors per worker: %d)",
        config.nproc_per_node,
        max(1, len(os.sched_getaffinity(0)) // config.nproc_per_node),
    )


_BOUNDS: dict[str, tuple[Callable[[float], bool], str]] = {
    "max_restarts": (
        lambda value: value >= 0 and is_in_range("max_restarts", value),
        f"0 to {range_of('max_restarts').maximum}",
    ),
    "monitor_interval": (lambda value: value > 0, "more than 0 seconds"),  # false for not-a-number
    "shutdown_timeout": (lambda value: value >= 0, "0 or more seconds"),
}


def _check_bounds(options: Options) -> None:
    for dest, (is_allowed, allowed) in _BOUNDS.items():
        value = getattr(options, dest)
        if value is not None and not is_allowed(value):
            raise user_error(f"{options.source(dest)}={value} is out of range; set it to {allowed}", AssertionError)


def _check_backend(options: Options) -> None:
    if options.standalone:
        return
    from rallypoint.rendezvous.handler import rendezvous_handler_registry

    with naming(f"{options.source('rdzv_backend')}={options.rdzv_backend}"):
        rendezvous_handler_registry.find(options.rdzv_backend)


def _check_signals(options: Options) -> None:
    source = options.source("signals_to_handle")
    for name in options.signals_to_handle.split(","):
        number = signal_number(name)
        if number is None:
            _log.warning("%s lists %r, which is not a signal on this system; it is ignored", source, name.strip())
        elif number in _UNCATCHABLE:
            raise UserError(f"{source} lists {number.name}, which cannot be handled; remove it")


def _check_devices(options: Options, environ: Mapping[str, str], workers: int) -> None:
    if options.virtual_local_rank:
        from rallypoint.base.devices import one_device_per_worker

        with naming(options.source("virtual_local_rank")):
            one_device_per_worker(environ, workers)


def _numa_options(options: Options, environ: Mapping[str, str], workers: int) -> NumaOptions | None:
    if options.numa_binding is None:
        return None
    from rallypoint.base.numa import NumaOptions, worker_cpus

    with naming(f"{options.source('numa_binding')}={options.numa_binding}"):
        numa_options = NumaOptions(options.numa_binding)
        worker_cpus(numa_options, workers, environ)
    return numa_options


def _check_event_handler(options: Options) -> None:
    if options.event_log_handler == "null":
        return
    from rallypoint.observe.telemetry.handlers import get_logging_handler

    with naming(options.source("event_log_handler")):
        get_logging_handler(options.event_log_handler)


def _logs_specs(options: Options) -> LogsSpecs:
    from rallypoint.workers.logs.specs import DefaultLogsSpecs, plugin_specs

    if (preflight := options.features.checks.preflight) and options.log_dir:
        from rallypoint.agent.feature import part

        part("preflight", ":await_log_dir")(options.log_dir, preflight)
    arguments: dict[str, Any] = {
        "log_dir": options.log_dir or None,
        "redirects": _streams(options, "redirects"),
        "tee": _streams(options, "tee"),
        "local_ranks_filter": _local_ranks(options),
    }
    if options.logs_specs in (None, "default"):
        _check_filters(options)
        return DefaultLogsSpecs(**arguments)
    with naming(f"{options.source('logs_specs')}={options.logs_specs}"):
        return plugin_specs(options.logs_specs, **arguments)


def _check_filters(options: Options) -> None:
    for dest in ("duplicate_stdout_filters", "duplicate_stderr_filters"):
        if getattr(options, dest) and options.log_dir == os.devnull:
            raise UserError(
                f"{options.source(dest)} writes filtered lines to a file, but "
                f"{options.source('log_dir')}={options.log_dir} is not a folder; set it to a folder"
            )


def _streams(options: Options, dest: str) -> Std | dict[int, Std]:
    from rallypoint.workers.logs.specs import Std

    with naming(options.source(dest)):
        return Std.from_str(getattr(options, dest))


def _local_ranks(options: Options) -> set[int] | None:
    text = options.local_ranks_filter
    if not text:
        return None
    try:
        return {int(part) for part in text.split(",")}
    except ValueError:
        source = options.source("local_ranks_filter")
        raise UserError(f"{source}={text!r} is not a valid list of local ranks; write it as 0,2") from None


# The number of workers (contract section 1.6)


def local_world_size(text: str, environ: Mapping[str, str], source: str = "--nproc-per-node") -> int:
    """Parse a number of workers, or count the devices for `auto`, `cpu`, `gpu` or another device name.

    `source` is the origin of the text, for messages.

    Raises:
        UserError: the text is invalid or less than one, or no such device exists, or devices cannot be counted.
    """
    try:
        size = int(text)
    except ValueError:
        from rallypoint.cli.worker_count import count_devices

        size = count_devices(text, environ, source)
    if size < 1:
        raise UserError(f"{source}={text!r} requests {size} workers; the minimum is 1")
    if not is_in_range("local_world_size", size):
        most = range_of("local_world_size").maximum
        raise UserError(f"{source}={text!r} requests {size} workers; the maximum per node is {most}")
    return size


# The rendezvous and its endpoint (contract section 1.5)


class RendezvousChoice(NamedTuple):
    """A rendezvous: `configs` are the backend's options, `node_rank` is the rank that this node requests, and
    `endpoint_flag` is the origin of the endpoint if the user set it (`endpoint_given`).
    """

    backend: str
    endpoint: str
    run_id: str
    configs: dict[str, Any]
    node_rank: int | None
    endpoint_flag: str = "--rdzv-endpoint"
    endpoint_given: bool = True


def choose_rendezvous(options: Options, max_nodes: int) -> RendezvousChoice:
    """Apply the table in section 1.5 from top to bottom. Raises UserError: an endpoint, a backend's option or a node
    rank cannot work.
    """
    configs: dict[str, Any] = dict(_configs(options))
    alone = options.standalone or _is_default_static(options, max_nodes)
    if configs:
        _warn_of_options(options, configs, "c10d" if options.standalone else options.rdzv_backend, alone)
    if peers := options.features.command.store_peers:
        configs["store_peers"] = peers
    if window := getattr(options.max_restarts, "window", 0):
        configs["restart_budget"] = f"{options.max_restarts}/{window:g}"
        if not alone and options.rdzv_backend not in BACKENDS:
            budget = f"{options.source('max_restarts')}={configs['restart_budget']}"
            _log.warning("%s: the backend %s ignores the period and counts all failures", budget, options.rdzv_backend)
    if alone:
        return _standalone(configs, announce=options.standalone)
    if not options.rdzv_id.isprintable():  # otherwise refused later, after more has begun
        text = f"{options.source('rdzv_id')}={options.rdzv_id!r} contains unprintable characters"
        raise UsageError(f"{text}; choose an id without them, the same on all nodes")
    if options.rdzv_backend == "static":
        return _static(options, configs, max_nodes)
    source = options.source("rdzv_endpoint")
    if not options.rdzv_endpoint:
        _log.warning(
            "--rdzv-backend=%s without --rdzv-endpoint uses the backend's default; "
            "--master-addr and --master-port apply to static only",
            options.rdzv_backend,
        )
    elif options.rdzv_backend == "c10d" and str(configs.get("store_type", "tcp")).lower() == "tcp":
        with naming(source):
            parse_endpoint(options.rdzv_endpoint, C10D_PORT)
    elif options.rdzv_backend in ON_ETCD:
        from rallypoint.rendezvous.backends.etcd import endpoints_of

        with naming(source):
            endpoints_of(options.rdzv_endpoint)
    preferred_rank = options.node_rank if "node_rank" in options.sources else None
    return RendezvousChoice(
        options.rdzv_backend, options.rdzv_endpoint, options.rdzv_id, configs, preferred_rank, source
    )


def _is_default_static(options: Options, max_nodes: int) -> bool:
    nowhere = not options.rdzv_endpoint and options.master_port is None
    return options.rdzv_backend == "static" and nowhere and max_nodes == 1


def _standalone(configs: dict[str, Any], announce: bool) -> RendezvousChoice:
    choice = RendezvousChoice("c10d", "localhost:0", _uuid4(), configs, None)
    if announce:
        _log.info(
            "the rendezvous of this job is --rdzv-backend=%s --rdzv-endpoint=%s --rdzv-id=%s",
            choice.backend,
            choice.endpoint,
            choice.run_id,
        )
    return choice


def _uuid4() -> str:
    """A random UUID (RFC 9562, version 4). Importing `uuid` would cost more than the rest of this file."""
    number = int.from_bytes(os.urandom(16), "big") & ~(0xF000 << 64) & ~(0xC000 << 48) | 4 << 76 | 2 << 62
    text = f"{number:032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _static(options: Options, configs: dict[str, Any], max_nodes: int) -> RendezvousChoice:
    rank = options.node_rank
    if not 0 <= rank < max_nodes:
        raise UsageError(
            f"{options.source('node_rank')}={rank} is out of range with --nnodes={max_nodes}; set a different rank on "
            f"each node, from 0 to {max_nodes - 1}"
        )
    endpoint = options.rdzv_endpoint
    if endpoint:
        with naming(options.source("rdzv_endpoint")):
            parse_endpoint(endpoint, None)
    else:
        port = STATIC_PORT if options.master_port is None else options.master_port
        endpoint = f"{options.master_addr}:{port}"
        with naming(f"{options.source('master_addr')} and {options.source('master_port')}"):
            parse_endpoint(endpoint, None)
    source = options.source("rdzv_endpoint" if options.rdzv_endpoint else "master_addr")
    is_given = bool(options.rdzv_endpoint) or "master_addr" in options.sources
    return RendezvousChoice("static", endpoint, options.rdzv_id, configs | {"rank": rank}, None, source, is_given)


def _warn_of_options(options: Options, conf: dict[str, Any], backend: str, alone: bool) -> None:
    """Warn about unknown options, but not for plug-ins. A job that is `alone` always uses c10d."""
    from rallypoint.rendezvous.backends.option_table import KNOWN

    if (known := KNOWN.get(backend)) is not None:
        warn_of_options(options.source("rdzv_conf"), conf, backend, known | KNOWN["c10d"] if alone else known)


def _configs(options: Options) -> dict[str, str]:
    source = options.source("rdzv_conf")
    with naming(source):
        configs = parse_rdzv_conf(options.rdzv_conf)
    for key in _RESERVED:
        if key in configs:
            raise UserError(f"{source} contains the key {key!r}, which has its own flag; use the flag instead")
    return configs


def checked(options: Options, environ: Mapping[str, str]) -> Features:
    """Check the values, and warn about those without effect here. Returns them with absolute paths. Raises UserError:
    a value cannot work.
    """
    own = options.features
    if own.preemption.wanted or own.preemption.requeue:
        _check_preempt_signals(options, own.preemption)
        _check_deadline(options, own.preemption, environ)
        _check_requeue(options, own.preemption, environ)
    if own.hangs.on_hang != "report" and not own.hangs.hang_timeout:
        _log.warning("%s=%s has no effect without --hang-timeout", options.source("on_hang"), own.hangs.on_hang)
    if own.topology != TopologyOptions():
        from rallypoint.clusters.topology import check_topology

        check_topology(
            own.topology.node_domain, own.topology.segment, parse_nnodes(options.nnodes, options.source("nnodes"))[0]
        )
    if own.tools != ToolOptions():
        from rallypoint.agent.feature import part

        part("wrap", ":check")(own, environ, options.source("wrap"), options.source("wrap_ranks"))
    return own._replace(
        recovery=own.recovery.replace(progress_file=_progress_file(options)),
        output=own.output.replace(incident_dir=_incident_dir(options)),
    )


def _check_preempt_signals(options: Options, preemption: PreemptionOptions) -> None:
    source = options.source("preempt_signals")
    with naming(f"{source}={preemption.preempt_signals}"):
        numbers = preemption.signals
    handled = {signal_number(name) for name in options.signals_to_handle.split(",")}
    for number in sorted(numbers & handled):
        raise UsageError(
            f"{signal_name(number)} is listed in both {source} and "
            f"{options.source('signals_to_handle')}={options.signals_to_handle}; remove it from one of them"
        )


def _check_deadline(options: Options, preemption: PreemptionOptions, environ: Mapping[str, str]) -> None:
    from rallypoint.agent.feature import part

    end_time = part("preemption", "deadline:end_time")
    seconds = preemption.stop_before_end
    flag = f"{options.source('stop_before_end')}={seconds:g}"
    if not (seconds >= 0 and is_in_range("seconds", seconds)):
        raise UsageError(f"{flag} is out of range; set it to 0 or more seconds")
    now = time.time()
    end = end_time(environ, now) if seconds else None
    if end is not None and now < end <= now + seconds:
        raise UsageError(f"{flag} must be less than the {end - now:.0f} s that this job has left")


def _check_requeue(options: Options, preemption: PreemptionOptions, environ: Mapping[str, str]) -> None:
    if not preemption.requeue:
        return
    flag = f"{options.source('requeue')}={preemption.requeue}"
    if not preemption.wanted:
        raise UsageError(
            f"{flag} has no effect unless the job can be preempted; add --preempt-signals or --stop-before-end"
        )
    from shutil import which

    from rallypoint.agent.feature import part

    job = part("preemption", "limits:job_name")(environ)
    if not job:
        raise UsageError(f"{flag} {part('preemption', 'limits:why_no_requeue')(environ)}")
    if environ.get("ENVIRONMENT") != "BATCH":
        _log.warning("%s: Slurm requeues only batch jobs, but this is not one; start it with sbatch", flag)
    if which("scontrol", path=environ.get("PATH")) is None:
        _log.warning(
            "%s: scontrol is not on the PATH, so job %s cannot be requeued; install scontrol there, or let the batch "
            "script run 'scontrol requeue %s' when srun exits with code 143",
            flag,
            job,
            job,
        )


def _progress_file(options: Options) -> str:
    path = options.features.recovery.progress_file
    if path and (os.path.isdir(path) or not os.path.isdir(os.path.dirname(path) or ".")):
        raise UserError(
            f"{options.source('progress_file')}={path} cannot be written by workers: "
            f"{'it is a folder' if os.path.isdir(path) else 'its folder does not exist'}; choose a file in an existing "
            "folder"
        )
    return os.path.abspath(path) if path else ""


def _incident_dir(options: Options) -> str:
    """The folder, created now, so that an error shows before the folder is needed."""
    path = options.features.output.incident_dir
    try:
        if path:
            os.makedirs(path, exist_ok=True)
        if not path or os.access(path, os.W_OK | os.X_OK):
            return os.path.abspath(path) if path else ""
        why = "it is not writable"
    except OSError as error:
        why = error.strerror or str(error)
    source = options.source("incident_dir")
    raise UsageError(f"{source}={path} cannot be used for incidents: {why}; choose a folder that you own")


OURS = frozenset(
    f"RALLYPOINT_{name}"
    for name in (
        *("ENDPOINT", "JOBS_DIR", "SECRET", "SECRET_FILE", "ETCD_PASSWORD", "ETCD_PASSWORD_FILE"),
        *("STORE", "NOTICES", "STANDBY", "TERMINATION_GRACE"),
        *("VERDICT_FILE", "TERMINATION_LOG", "HTTP_TOKEN_FILE", "INCIDENT_ENV", "SERVICE"),
        *("SHIM", "SHIM_PYTHON"),
    )
)
"""Variables that this program reads."""
_ALMOST = 0.8
"""Minimum similarity to one of `OURS`, from 0 to 1: Kubernetes sets similar variables for services."""


def warn_of_variables(environ: Mapping[str, str]) -> None:
    """Warn about variables whose names resemble those of flags (`PET_NNODE`) or one of `OURS`."""
    flags = {flag.variable: flag for flag in FLAGS}
    for name in sorted(name for name in environ if name.startswith("PET_")):
        flag = flags.get(name)
        if flag is None:
            known = {flag.variable.removeprefix("PET_"): flag.variable for flag in FLAGS if flag.from_environment}
            from rallypoint.cli.similar_names import closest_match

            similar = closest_match(name.removeprefix("PET_"), known)
            _log.warning(
                "%s has no effect: no flag reads it%s", name, f"; did you mean {known[similar]}?" if similar else ""
            )
        elif not flag.from_environment:
            _log.warning("%s has no effect: %s is read only from the command line; set it there", name, flag.name)
    ours = {name.removeprefix("RALLYPOINT_"): name for name in OURS}
    for name in sorted(name for name in environ if name.startswith("RALLYPOINT_") and name not in OURS):
        from rallypoint.cli.similar_names import closest_match

        similar = closest_match(name.removeprefix("RALLYPOINT_"), ours, _ALMOST)
        if similar:
            _log.warning("%s has no effect: nothing reads it; did you mean %s?", name, ours[similar])


def warn_of_options(source: str, names: Collection[str], backend: str, known: Collection[str]) -> None:
    """Warn about options from `source` (`--rdzv-conf` or `PET_RDZV_CONF`) that the backend does not know."""
    for name in sorted(set(names).difference(known)):
        similar = _MEANT.get(name, "")
        if similar not in known and not similar.startswith("--"):
            from rallypoint.cli.similar_names import closest_match

            similar = closest_match(name, known)
        hint = f"; did you mean {similar}?" if similar else ""
        _log.warning("%s: the option %r has no effect with the backend %s%s", source, name, backend, hint)


_MEANT = {"timeout": "join_timeout", "join_timeout": "timeout", "rank": "--node-rank"}
"""Names of options in other backends, and options whose own flag takes precedence."""
