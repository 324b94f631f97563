"""Section 1 of the contract: flags, `PET_*` variables, commands, other variables, impossible values."""

from __future__ import annotations

from tests.conformance.side_by_side.case import Case, Entry
from tests.conformance.side_by_side.workers import ONCE, SHOW, exits

ALONE = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=job")

_PYTHON = """#!/bin/sh
echo "python was $0 $1 $2"
exec python "$@"
"""

SIZES = [
    Case("1.1 a bare script", (), SHOW),
    Case("1.1 arguments", (), SHOW, ("script.py", "a", "--b", "-c", "", "d e")),
    Case("1.1 --standalone", "--standalone", SHOW),
    Case("1.1 --role", "--role=trainer --nproc-per-node=2", SHOW),
    Case("1.1 --monitor-interval", "--monitor-interval=0.5", SHOW),
    Case("1.1 --logs-specs=default", "--logs-specs=default --log-dir=logs -r 3", SHOW),
    Case("1.4 --nnodes as a range", (*ALONE, "--nnodes=1:2", "--rdzv-conf=last_call_timeout=1"), SHOW),
    Case(
        "1.5 --standalone over other flags", "--standalone --rdzv-id=x --rdzv-endpoint=h:1 --rdzv-backend=static", SHOW
    ),
    Case("1.5 c10d with an id", ALONE, SHOW),
    Case("1.5 an empty id", "--rdzv-backend=c10d --rdzv-endpoint=localhost:0 --rdzv-id=", SHOW),
    Case("1.5 static at an endpoint", "--rdzv-backend=static --rdzv-endpoint=127.0.0.1:{port} --rdzv-id=job", SHOW),
    Case("1.5 static at --master-port", "--master-port={port}", SHOW),
    Case("1.5 --local-addr", (*ALONE, "--local-addr=127.0.0.1"), SHOW),
    Case("1.6 --nproc-per-node=3", "--nproc-per-node=3", SHOW),
    Case("1.6 --nproc-per-node=cpu", "--nproc-per-node=cpu", SHOW, machine=True),
    Case("1.6 --nproc-per-node=auto", "--nproc-per-node=auto", SHOW, env=(("CUDA_VISIBLE_DEVICES", ""),), machine=True),
    Case("4.2 --rdzv-conf", (*ALONE, "--rdzv-conf=read_timeout=20, join_timeout = 30,unknown=x,read_timeout=30"), SHOW),
    Case("4.2 --rdzv-conf=is_host", (*ALONE, "--rdzv-conf=is_host=1,timeout=30"), SHOW),
    Case(
        "4.4 a file as the store",
        "--rdzv-backend=c10d --rdzv-endpoint={here}/store --rdzv-conf=store_type=file --rdzv-id=j",
        SHOW,
        differs=("no pickle",),
        machine=True,  # what torchrun writes there is never the same
    ),
]

VARIABLES = [
    Case("1.2 PET_NPROC_PER_NODE", (), SHOW, env=(("PET_NPROC_PER_NODE", "2"),)),
    Case("1.2 the command line wins", "--nproc-per-node=1", SHOW, env=(("PET_NPROC_PER_NODE", "2"),)),
    Case("1.2 PET_STANDALONE", (), SHOW, env=(("PET_STANDALONE", "1"), ("PET_ROLE", "r"))),
    Case("1.2 PET_MODULE", (), SHOW, ("script", "a"), env=(("PET_MODULE", "1"), ("PET_M", "0"))),
    Case("1.2 PET_NO_PYTHON", (), "", ("echo", "a", "${local_rank}"), env=(("PET_NO_PYTHON", "1"),)),
    Case("1.2 PET_LOG_DIR and PET_TEE", (), "print('hello')", env=(("PET_LOG_DIR", "logs"), ("PET_TEE", "3"))),
    Case("1.2 PET_MAX_RESTARTS", (), ONCE, env=(("PET_MAX_RESTARTS", "1"),)),
    Case("1.2 PET_START_METHOD=bogus", (), SHOW, env=(("PET_START_METHOD", "bogus"),)),
    Case(
        "1.2 PET_RDZV_*",
        (),
        SHOW,
        env=(("PET_RDZV_BACKEND", "c10d"), ("PET_RDZV_ID", "p"), ("PET_RDZV_ENDPOINT", "localhost:0")),
    ),
    Case("1.10 OMP_NUM_THREADS and two workers", "--nproc-per-node=2", SHOW, env=(("OMP_NUM_THREADS", None),)),
    Case("1.10 OMP_NUM_THREADS is set", "--nproc-per-node=2", SHOW, env=(("OMP_NUM_THREADS", "7"),)),
    Case(
        "1.12 PYTHON_EXEC",
        (),
        "print('hello')",
        env=(("PYTHON_EXEC", "{here}/python.sh"),),
        files=(("python.sh", _PYTHON),),
    ),
    Case("1.12 PYTHON_EXEC is missing", (), SHOW, env=(("PYTHON_EXEC", "/no/such/python"),), code=1),
    Case("1.12 LOGLEVEL=bogus", (), SHOW, env=(("LOGLEVEL", "bogus"),), code=1),
    Case("1.12 no shared store", ALONE, SHOW, env=(("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),)),
    Case("1.12 identical workers", "--nproc-per-node=2", SHOW, env=(("TORCH_ELASTIC_WORKER_IDENTICAL", "1"),)),
    Case("1.12 NCCL's error handling", (), SHOW, env=(("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),)),
    Case("1.12 a shutdown timeout that is none", (), SHOW, env=(("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "abc"),), code=1),
    Case("1.12 a file timer", (), SHOW, env=(("TORCHELASTIC_ENABLE_FILE_TIMER", "1"),)),
    Case(
        "1.12 a named file timer",
        (),
        SHOW,
        env=(("TORCHELASTIC_ENABLE_FILE_TIMER", "1"), ("TORCHELASTIC_TIMER_FILE", "{here}/timer")),
    ),
    Case("1.12 a health check's port that is none", (), SHOW, env=(("TORCHELASTIC_HEALTH_CHECK_PORT", "abc"),)),
    Case(
        "1.12 variables of an agent that is a worker",
        (),
        SHOW,
        env=(("RANK", "5"), ("WORLD_SIZE", "9"), ("MASTER_ADDR", "h"), ("LOCAL_RANK", "5")),
    ),
]

PARSING = [
    Case("1.3 a prefix of a flag", "--stand --ro x", SHOW),
    Case("1.3 an ambiguous prefix", "--nproc 2", SHOW, code=2),
    Case("1.3 underscores", "--nproc_per_node 2 --max_restarts 1 --log_dir logs", SHOW),
    Case("1.3 short flags in one word", "-mr3 --log-dir=logs", SHOW, ("script",)),
    Case("1.3 no script", "--standalone", SHOW, (), code=2),
    Case("1.3 an unknown flag", "--no-such-flag", SHOW, code=2),
    Case("1.3 -- before the script", "--standalone --", SHOW, ("script.py", "--x")),
    Case("1.3 -- after the script", (), SHOW, ("script.py", "--", "a", "--", "b")),
    Case("1.3 flags after the script", (), SHOW, ("script.py", "--nproc-per-node", "2", "-m", "--help")),
    Case("1.3 --help", "--help", SHOW),
    Case("1.7 -m", "-m", SHOW, ("script", "a")),
    Case("1.7 --module of a package", "--module", files=(("inner.py", SHOW),), words=("inner",)),
    Case("1.7 -m without the module", "-m", words=("no_such_module",), code=1),
    Case("1.7 --no-python", "--no-python --nproc-per-node=2", words=("echo", "rank ${local_rank}", "$$x")),
    Case(
        "1.7 --no-python with a path",
        "--no-python",
        words=("./tool.sh", "a"),
        files=(("tool.sh", "#!/bin/sh\necho tool $1 $LOCAL_RANK\n"),),
    ),
    Case("1.7 --no-python without the program", "--no-python", words=("no-such-program",), code=1),
    Case("1.7 --no-python with what is no program", "--no-python", SHOW, ("./script.py",), code=1),
    Case("1.7 --no-python and a macro in the program's name", "--no-python", words=("echo${local_rank}",), code=1),
    Case(
        "1.7 macros",
        "--nproc-per-node=2",
        SHOW,
        ("script.py", "${local_rank}", "$local_rank", "$$x", "${other}", "$", "a$local_rank.b"),
    ),
    Case(
        "1.7 a macro in the script's name",
        "--nproc-per-node=2",
        words=("script${local_rank}.py",),
        files=(("script0.py", SHOW), ("script1.py", SHOW)),
    ),
    Case(
        "1.7 --run-path",
        "--run-path --nproc-per-node=2",
        SHOW,
        ("script.py", "${local_rank}"),
        differs=("functions lead a session", "functions write at once"),
    ),
    Case(
        "1.8 --virtual-local-rank",
        "--virtual-local-rank --nproc-per-node=2 --log-dir=logs -r 1",
        SHOW,
        env=(("CUDA_VISIBLE_DEVICES", "3, 1"),),
    ),
    Case(
        "1.8 --virtual-local-rank on ROCm",
        "--virtual-local-rank --nproc-per-node=2",
        SHOW,
        env=(("CUDA_VISIBLE_DEVICES", "3,1"), ("HIP_VISIBLE_DEVICES", "4, 5")),
        since="2.15",
    ),
]


_DEPRECATED = Entry.LAUNCH

ENTRIES = [
    Case("1.1 python -m", "--nproc-per-node=2", SHOW, entry=Entry.RUN),
    Case("1.1 python -m without a script", (), SHOW, (), entry=Entry.RUN, code=2),
    Case("1.14 launch", "--nproc-per-node=2", SHOW, ("script.py", "a"), entry=_DEPRECATED),
    Case("1.14 launch --use-env", "--use-env", SHOW, ("script.py", "--use-env"), entry=_DEPRECATED),
    Case(
        "1.14 launch and a variable",
        (),
        SHOW,
        env=(("PET_USE_ENV", "1"), ("PET_NPROC_PER_NODE", "2")),
        entry=_DEPRECATED,
    ),
    Case("1.14 launch --no-python", "--no-python", words=("echo", "a"), entry=_DEPRECATED, code=1),
    Case("1.14 launch that fails", "--nproc-per-node=1", exits("3"), entry=_DEPRECATED, code=1),
]

CASES = [*SIZES, *VARIABLES, *PARSING, *ENTRIES]
