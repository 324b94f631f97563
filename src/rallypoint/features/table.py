"""The features, one row per feature. Cheap to import: a feature is imported only if its row requires it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rallypoint.agent.feature import Load, Row

NVIDIA_DEVICES = ("/dev/nvidiactl", "/dev/dxg")
"""One of these exists where programs can reach NVIDIA's driver: on Linux, and in Linux on Windows. Only the driver's
library tells which memory is in use."""

OF_A_TASK = (
    *("PMIX_RANK", "PMI_RANK", "PMI_FD", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID"),
    "FLUX_TASK_RANK",
)
"""One of these is set if an MPI launcher, or srun with MPI, started this process as one of its tasks."""


def sees_gpus(environ: Mapping[str, str]) -> bool:
    """Whether workers may see NVIDIA GPUs. Cheap; True if uncertain."""
    return environ.get("CUDA_VISIBLE_DEVICES") != "" and any(map(os.path.exists, NVIDIA_DEVICES))


FEATURES = (
    Row(
        "incidents",
        ":Incidents",
        wanted=lambda options: bool(options.output.incident_dir),
        example="--incident-dir=incidents",
        loaded_by=("CollectRequested",),
    ),
    Row(
        "hangs",
        "agent:Hangs",
        Load.WHEN_STARTED,
        wanted=lambda options: bool(options.hangs.hang_timeout),
        by_default=True,
        example="--hang-timeout=60",
        loaded_by=("HangFound", "HangReport", "CollectRequested", "CollectedPart", "CollectionEnded"),
    ),
    Row(
        "preemption",
        "agent:WholeJobPreemption",
        wanted=lambda options: options.preemption.wanted,
        example="--preempt-signals=SIGUSR2",
        loaded_by=("Preempted",),
    ),
    Row(
        "preflight",
        "mesh:Mesh",
        wanted=lambda options: bool(options.checks.preflight),
        example="--preflight=warn",
        admits=":admit_node",
    ),
    Row(
        "node_check", ":NodeChecks", wanted=lambda options: bool(options.checks.node_check), example="--node-check=true"
    ),
    Row(
        "host_limit",
        ":HostLimit",
        wanted=lambda options: bool(options.recovery.host_failure_limit),
        example="--host-failure-limit=3",
    ),
    Row(
        "worker_env",
        ":WorkerEnv",
        wanted=lambda options: bool(options.frameworks.worker_env),
        example="--worker-env=ompi",
    ),
    Row(
        "task_variables",
        wanted=lambda options: (
            not os.environ.keys().isdisjoint(OF_A_TASK) and "inherit" not in options.frameworks.worker_env
        ),
        admits=":take_away",
    ),
    Row(
        "socket_ifname",
        ":SocketIfname",
        wanted=lambda options: bool(options.frameworks.socket_ifname),
        example="--socket-ifname=lo",
    ),
    Row(
        "gpu_memory",
        ":MemoryWait",
        Load.WHEN_STARTED,
        wanted=lambda options: bool(options.recovery.gpu_memory_timeout) and sees_gpus(os.environ),
    ),
    Row(
        "flight_recorder",
        ":FlightRecorder",
        wanted=lambda options: options.hangs.flight_recorder,
        example="--flight-recorder",
    ),
    Row("preload", "agent:Preload", wanted=lambda options: bool(options.recovery.preloaded), example="--preload=json"),
    Row(
        "wrap",
        ":Wrap",
        wanted=lambda options: bool(options.tools.wrap or options.tools.wrap_ranks),
        example="--wrap=env",
    ),
    Row(
        "collapse",
        ":Collapse",
        wanted=lambda options: bool(options.output.tee_collapse),
        example="--tee-collapse=1 --tee=3",
    ),
    Row(
        "topology",
        ":Topology",
        wanted=lambda options: bool(options.topology.node_domain) or options.topology.segment != 1,
        example="--node-domain=rack",
        admits=":add_segment",
    ),
    Row("inprocess", "agent:InProcess", Load.WITH_FOLDER),
    Row("standby", ":StandbyWorkers", wanted=lambda options: bool(options.recovery.standby), example="--standby=1"),
    Row("pages", serves=":begin_pages"),
    Row("local_jobs", ":LocalJobs", Load.WHEN_PLACED),
    Row("live_line", ":WaitingLine", Load.ON_MESSAGE, loaded_by=("ProgressText",)),
    Row(
        "trainjob",
        ":TrainJobStatus",
        Load.WHEN_STARTED,
        wanted=lambda _options: "KUBEFLOW_TRAINER_SERVER_URL" in os.environ,
    ),
    Row("reports", ":Reports", Load.ON_MESSAGE, loaded_by=("ReportRequested", "CollectRequested")),
    Row("drills", ":Drills", Load.ON_MESSAGE, loaded_by=("FaultRequested",)),
)
