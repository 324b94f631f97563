"""The corpus: the launched programs, and the right answers.

The programs are in `programs/`, one per file, with one row each here. A case without a right answer yet is also in
`OPEN`, with what is missing; the change that fixes it removes it.
"""

from __future__ import annotations

import signal

from tests.causes.case import Act, Case, Source

_LABELS = r"ValueError: batch 7 has no labels"
_SILENCE = r"sign of life|silent|hang"
_LOGS = ("--log-dir=logs",)
_IN_GROUP = """
    mkdir "$GROUP"
    echo 500M >"$GROUP/memory.limit_in_bytes"
    echo $$ >"$GROUP/cgroup.procs"
    exec "$@"
"""
"""Runs in a control group of its own, which the runner takes away."""
_MEMORY = ("a control group of version 1",)

CASES = (
    # Exceptions of one rank, with and without what is set around it
    Case("raises", "raises", (_LABELS, "in load_batch"), 1, fast=True),
    Case("raises-tee", "raises", (_LABELS, "in load_batch"), 1, flags=("--tee=3", *_LOGS), fast=True),
    Case("raises-redirected", "raises", (_LABELS, "in load_batch"), 1, flags=("-r", "3", *_LOGS), fast=True),
    Case("raises-stderr-redirected", "raises", (_LABELS,), 1, flags=("-r", "2", *_LOGS)),
    Case("raises-filtered", "raises", (_LABELS,), 1, flags=("--local-ranks-filter=0", "--tee=3", *_LOGS), fast=True),
    Case("raises-restarted", "raises", (_LABELS,), 1, flags=("--max-restarts=1",), fast=True),
    Case("raises-two-nodes", "raises", (_LABELS,), 1, nodes=2, workers=1, fast=True),
    Case("raises-recorded", "raises_recorded", (_LABELS,), 1, fast=True),
    Case("raises-recorded-redirected", "raises_recorded", (_LABELS,), 1, flags=("-r", "3", *_LOGS)),
    Case("raises-recorded-two-nodes", "raises_recorded", (_LABELS,), 1, nodes=2, workers=1),
    Case(
        "relative-folder",
        "relative_folder",
        (rf"{_LABELS}\n=====",),
        1,
        never=("FileNotFoundError",),
        flags=_LOGS,
        issue="C6b",
        fast=True,
    ),
    Case("import-fails", "import_fails", ("ImportError: cannot import name 'f1_score' from 'metrics'",), fast=True),
    Case("syntax-error", "syntax_error", (r"train\.py", "SyntaxError: '\\(' was never closed"), fast=True),
    Case("missing-module", "missing_module", ("ModuleNotFoundError: No module named 'no_such_tokenizer'",), fast=True),
    Case("missing-file", "missing_file", ("FileNotFoundError: .*/data/no-such-set/index.json",), fast=True),
    Case(
        "missing-script",
        "no_such_script.py",
        ("the script no_such_script.py does not exist|can't open file .*no_such_script.py",),
        fast=True,
    ),
    Case("missing-program", "no_such_program", ("no_such_program.*(not found|No such file)",), flags=("--no-python",)),
    Case(
        "missing-package",
        "no_such_package.train",
        ("No module named no_such_package|No module named 'no_such_package'",),
        flags=("-m",),
    ),
    Case(
        "bad-argument",
        "bad_argument",
        ("unrecognized arguments: --epoch-count=3",),
        arguments=("--epoch-count=3",),
        fast=True,
    ),
    Case(
        "bad-value",
        "bad_argument",
        ("argument --epochs: invalid int value: 'three'",),
        arguments=("--epochs=three",),
    ),
    Case("assertion", "assertion", ("AssertionError", "assert hidden % heads == 0"), 0),
    Case("recursion", "recursion", ("RecursionError: maximum recursion depth exceeded", "in flatten"), 1, fast=True),
    Case("huge-message", "huge_message", ("ValueError: unexpected keys in the state",), 1),
    Case("many-lines", "many_lines", ("RuntimeError: Error", "size mismatch for head.weight"), 1, fast=True),
    Case("blank-line", "blank_line", ("ValueError: 2 validation errors", "bf16 and fp8 exclude"), 1, fast=True),
    Case("binary-noise", "binary_noise", ("ValueError: the vocabulary has no token <pad>",), 1, fast=True),
    Case(
        "noise-after",
        "noise_after",
        ("ValueError: the learning rate must be positive",),
        1,
        never=("is shut down",),
        fast=True,
    ),
    Case(
        "noise-after-redirected",
        "noise_after",
        ("ValueError: the learning rate must be positive",),
        1,
        flags=("-r", "3", *_LOGS),
    ),
    Case("group", "raises_group", ("TimeoutError: shard 3 was not served",), 0, fast=True),
    Case(
        "chain",
        "raises_from",
        ("KeyError: 'learning_rate'", "RuntimeError: cannot set up the optimizer"),
        1,
        fast=True,
    ),
    Case(
        "thread",
        "raises_in_thread",
        ("ConnectionRefusedError: the object store refuses shard 12", "in prefetch"),
        1,
        fast=True,
    ),
    Case("pool", "raises_in_pool", ("OSError: a.jpg is no JPEG file", "in decode"), 0),
    Case(
        "finalizer",
        "raises_in_del",
        ("ZeroDivisionError: the validation set is empty",),
        1,
        never=("AttributeError: the cache",),
        fast=True,
    ),
    Case(
        "atexit",
        "raises_in_atexit",
        ("FloatingPointError: the loss is nan at step 310",),
        1,
        never=("RuntimeError: the summary writer",),
        fast=True,
    ),
    Case("child-process", "child_raises", ("LookupError: the merges file has no entry 50257", "in tokenize"), 1),
    Case("command", "command_fails", ("nvcc: fatal: unsupported GPU architecture", "CalledProcessError"), 0),
    Case(
        "survived-then-exits",
        "survived_traceback",
        ("the quota is used up",),
        1,
        never=("ConnectionError: no metrics server",),
        fast=True,
    ),
    Case(
        "survived-then-raises",
        "survived_then_raises",
        ("PermissionError: the token of the hub has expired",),
        1,
        never=("TimeoutError: attempt",),
        fast=True,
    ),
    Case("loader-raises", "loader_raises", ("OSError: image 0 is truncated", "in __getitem__"), 1),
    Case("loader-killed", "loader_killed", (r"DataLoader worker \(pid", "killed by signal: Killed"), 1),
    Case("hook", "raises_in_hook", ("ArithmeticError: the gradient of layer 3 is not finite", "in check"), 1),
    Case(
        "compiled",
        "raises_in_compiled",
        (r"Error.*(shape|size|dim)|must have|mat1 and mat2|same reduction dim",),
        1,
        seconds=60,
    ),
    Case("device-memory", "device_memory", ("OutOfMemoryError: CUDA out of memory",), 1),
    Case("inner-launcher", "launches_another", ("the inner program has no data|inner.py FAILED: rank 0",), 1),
    Case("spawned", "spawned_raises", ("ValueError: shard 0 is empty", "in shard"), 1),
    Case("framed", "framed_traceback", (_LABELS,), 1, fast=True),
    Case("json", "logged_as_json", (_LABELS,), 1, fast=True),
    Case("behind-a-bar", "raises_behind_a_bar", (_LABELS,), 1, fast=True),
    Case("each-line-logged", "logs_each_line", (_LABELS,), 1),
    Case("json-early", "logged_as_json_early", (_LABELS, "in train"), 1),
    Case("rich", "draws_with_rich", (_LABELS, "in load_batch"), 1),
    Case("loguru", "logs_as_loguru", (_LABELS, "in main"), 1),
    Case("coloured", "coloured_traceback", (_LABELS,), 1),
    Case("quotes-traceback", "quotes_traceback", ("RuntimeError: the reader on host n7", "KeyError: 'label'"), 1),
    Case("notes", "raises_with_notes", ("ValueError", "while reading shard 12", "batch 7 has no labels"), 1),
    Case("warns-at-the-end", "warns_at_the_end", (_LABELS,), 1, never=("ResourceWarning",), fast=True),
    Case(
        "many-finalizers",
        "many_finalizers",
        ("ZeroDivisionError: the validation set is empty",),
        1,
        never=("AttributeError: the cache",),
        fast=True,
    ),
    Case("task-lost", "task_lost", (_LABELS,), 1, never=("ConnectionError",)),
    Case("says-goodbye", "says_goodbye", (rf"{_LABELS}(.|\n)*goodbye",), 1, fast=True),
    *(
        Case(f"survived-{name}", program, ("the quota is used up",), 1, ("ConnectionError",), arguments, fast=fast)
        for name, program, arguments, fast in (
            ("in-function", "survived_in_function", (), True),
            ("long-ago", "survived_at_top", (), True),
            ("on-stdout", "survived_at_top", ("stdout",), False),
        )
    ),
    # Exits
    Case("returns-exit-code", "returns_exit_code", (rf"{_LABELS}(.|\n)*please report",), 1, fast=True),
    Case("logs-and-leaves", "logs_and_leaves", ("at least 4 GB in /dev/shm",), 1),
    Case("panics", "panics", ("panicked at src/loader.rs", "shard 7 has no labels"), 1),
    Case(
        "no-command",
        "bash",
        ("train_model: command not found",),
        flags=("--no-python",),
        arguments=("-c", "set -e\ntrain_model --lr 1"),
    ),
    Case("exits-with-message", "exits_with_message", ("global batch size 30 is not a multiple",), 1, fast=True),
    Case("exit-3", "exit_code", (r"exitcode  : 3 ",), 1, arguments=("exit", "3"), fast=True),
    Case("exit-77-at-once", "exit_code", (r"exitcode  : 77 ",), 1, arguments=("_exit", "77")),
    Case(
        "ends-then-raises",
        "ends_then_raises",
        ("ValueError: the best checkpoint has no optimizer state",),
        0,
        fast=True,
    ),
    # Standard output instead of standard error
    Case("stdout", "traceback_to_stdout", (_LABELS,), 1, issue="C5", fast=True),
    Case("stdout-tee", "traceback_to_stdout", (_LABELS,), 1, flags=("--tee=3", *_LOGS), issue="C5", fast=True),
    Case("stdout-redirected", "traceback_to_stdout", (_LABELS,), 1, flags=("-r", "3", *_LOGS), issue="C5", fast=True),
    Case(
        "stdout-filtered",
        "traceback_to_stdout",
        ("local-ranks-filter",),
        1,
        flags=("--local-ranks-filter=0",),
        issue="C5",
        fast=True,
    ),
    Case("stdout-merged", "streams_merged", (_LABELS,), 1, issue="C5", fast=True),
    Case("stdout-logged", "logged_to_stdout", ("KeyError: 'validation'",), 1, issue="C5"),
    Case("stdout-warning", "warning_then_stdout", (_LABELS,), 1, never=("UserWarning",), issue="C6", fast=True),
    Case(
        "stdout-warning-redirected",
        "warning_then_stdout",
        (_LABELS,),
        1,
        never=("UserWarning",),
        flags=("-r", "3", *_LOGS),
        issue="C6",
    ),
    # Signals
    *(
        Case(
            f"signal-{name.lower()}",
            "by_signal",
            (rf"exitcode  : -{number} .*\({name}\)",),
            1,
            arguments=(name,),
            fast=fast,
        )
        for name, number, fast in (
            ("SIGKILL", 9, True),
            ("SIGTERM", 15, True),
            ("SIGSEGV", 11, False),
            ("SIGABRT", 6, False),
            ("SIGBUS", 7, False),
            ("SIGFPE", 8, False),
            ("SIGILL", 4, False),
            ("SIGINT", 2, False),
            ("SIGHUP", 1, False),
            ("SIGQUIT", 3, False),
            ("SIGPIPE", 13, False),
            ("SIGUSR1", 10, False),
        )
    ),
    Case("interrupted-alone", "interrupted_alone", (r"KeyboardInterrupt|SIGINT",), 1, fast=True),
    Case("processor-time", "cpu_limit", (r"SIGXCPU",), 1),
    Case("null-pointer", "null_pointer", ("SIGSEGV", "in fused_kernel"), 1, fast=True),
    Case("heap", "heap_corrupted", ("SIGABRT", r"free\(\): invalid", "in release"), 1),
    Case("terminates", "terminates", ("SIGABRT", r"what\(\): +CUDA error: an illegal memory access"), 1),
    Case("raises-then-aborts", "raises_then_aborts", ("SIGABRT", _LABELS), 1, fast=True),
    # Memory, disks, limits
    Case("memory-error", "memory_error", ("MemoryError",), 1, fast=True),
    Case(
        "out-of-memory",
        "out_of_memory",
        ("SIGKILL", "out-of-memory killer", "limit 500 MB"),
        1,
        shell=_IN_GROUP,
        needs=_MEMORY,
    ),
    Case(
        "child-out-of-memory",
        "child_out_of_memory",
        ("out-of-memory killer has killed .*child of (this|a) rank", "exited unexpectedly"),
        1,
        shell=_IN_GROUP,
        needs=_MEMORY,
    ),
    Case(
        "child-out-of-memory-silent",
        "child_out_of_memory_silent",
        ("out-of-memory killer has killed .*child of (this|a) rank",),
        1,
        never=("last lines of standard error",),
        shell=_IN_GROUP,
        needs=_MEMORY,
    ),
    Case("disk-full", "disk_full", ("No space left on device", "in save"), 0, fast=True),
    Case(
        "disk-full-everywhere",
        "disk_full_everywhere",
        ("No space left on device",),
        0,
        shell='exec unshare -m sh -c \'mount -t tmpfs -o size=1m none "$TMPDIR" && exec "$@"\' sh "$@"',
        needs=("a mount namespace",),
    ),
    Case("file-too-large", "file_too_large", ("OSError.*File too large",), 0, fast=True),
    Case("too-many-files", "too_many_files", ("OSError.*Too many open files",), 1, fast=True),
    Case(
        "shared-memory",
        "shared_memory_full",
        ("SIGBUS", "/dev/shm is nearly full"),
        1,
        shell='exec unshare -m sh -c \'mount -t tmpfs -o size=4m none /dev/shm && exec "$@"\' sh "$@"',
        needs=("a mount namespace",),
    ),
    # The launcher's environment
    Case(
        "other-environment",
        "needs_environment",
        ("No module named 'only_in_my_environment'", r"/my-environment"),
        flags=("--max-restarts=3",),
        shell="""
            site=my-environment/lib/python3.11/site-packages
            mkdir -p $site my-environment/bin
            ln -s "$(command -v python3)" my-environment/bin/python
            echo "home = /usr/bin" >my-environment/pyvenv.cfg
            echo "def train(): pass" >$site/only_in_my_environment.py
            export VIRTUAL_ENV=$PWD/my-environment PATH=$PWD/my-environment/bin:$PATH
            exec "$@"
        """,
        issue="C7",
    ),
    # Collectives
    Case(
        "collective-timeout",
        "collective_timeout",
        (r"rank 1 .*read_the_slow_bucket|read_the_slow_bucket.*rank 1", r"all_reduce"),
        issue="C3",
    ),
    Case(
        "collective-timeout-two-nodes",
        "collective_timeout",
        (r"rank 1 .*read_the_slow_bucket|read_the_slow_bucket.*rank 1",),
        nodes=2,
        workers=1,
        seconds=45,
        issue="C3",
    ),
    Case(
        "collective-timeout-incident",
        "collective_timeout",
        ("read_the_slow_bucket",),
        own_flags=("--incident-dir=incidents",),
        source=Source.INCIDENT,
        issue="C4",
    ),
    Case(
        "shapes-differ",
        "shapes_differ",
        (r"op\.preamble\.length|collective mismatch",),
        never=("Connection (closed|reset)",),
    ),
    Case(
        "wrong-order",
        "wrong_order",
        (r"rank 1", r"in validate"),
    ),
    Case(
        "never-joins",
        "rank_never_joins",
        (r"rank 1", r"download_the_weights"),
    ),
    Case(
        "monitored-barrier",
        "monitored_barrier",
        (r"[Rr]ank 1", "in evaluate"),
    ),
    Case(
        "ends-early",
        "ends_early",
        (r"rank 1 .*(ended|exited|finished) with 0|rank 1 .*exit code 0",),
        issue="C8b",
    ),
    Case(
        "ends-early-quietly",
        "ends_early_quietly",
        (r"rank 1 .*(ended|exited|finished) with 0", "rank 0"),
        seconds=90,
        issue="C8",
    ),
    Case(
        "ends-early-status",
        "ends_early_quietly",
        (r"rank 1 .*(ended|exited|finished) with 0",),
        source=Source.STATUS,
        issue="C8",
    ),
    *(
        Case(f"beside-collective-{number}", "raises_beside_collective", (_LABELS,), 1, issue="C1c", by_chance=True)
        for number in (1, 2, 3)
    ),
    Case(
        "beside-collective-two-nodes",
        "raises_beside_collective",
        (_LABELS,),
        1,
        nodes=2,
        workers=1,
        issue="C1c",
        by_chance=True,
    ),
    Case("killed-beside-collective", "killed_beside_collective", ("SIGKILL",), 1, by_chance=True),
    Case(
        "killed-beside-collective-two-nodes",
        "killed_beside_collective",
        ("SIGKILL",),
        1,
        nodes=2,
        workers=1,
        by_chance=True,
    ),
    Case("data-parallel", "data_parallel", ("ValueError: the loss of step 2 is nan",), 2, workers=3, by_chance=True),
    Case("unused-parameters", "unused_parameters", ("RuntimeError: Expected to have finished reduction",)),
    # Failures of ranks that live on, or die late
    Case("stays", "raises_and_stays", (_LABELS, r"threading|_shutdown|prefetcher|not ended|running"), 1, issue="C1"),
    Case("stays-recorded", "raises_and_stays_recorded", (_LABELS,), 1, issue="C1"),
    Case(
        "stays-alone",
        "raises_and_stays_alone",
        (r"rank 1 .*(raised|traceback).*running|rank 1.*ValueError",),
        issue="C2",
    ),
    Case(
        "stays-alone-status",
        "raises_and_stays_alone",
        (r"rank 1 .*(raised|traceback|ValueError)",),
        source=Source.STATUS,
        issue="C2",
    ),
    Case("cleans-up", "raises_then_cleans_up", (_LABELS,), 1, issue="C1b"),
    Case("cleans-up-two-nodes", "raises_then_cleans_up", (_LABELS,), 1, nodes=2, workers=1, issue="C1b"),
    Case("peer-goes-first", "peer_goes_first", (_LABELS,), 1, never=("ConnectionResetError",), issue="C1b", fast=True),
    Case("peer-goes-first-redirected", "peer_goes_first", (_LABELS,), 1, flags=("-r", "3", *_LOGS), issue="C1b"),
    Case("peer-goes-first-two-nodes", "peer_goes_first", (_LABELS,), 1, nodes=2, workers=1, issue="C1b"),
    # Stores and ports
    Case("port-taken", "port_taken", ("OSError.*Address already in use", "in serve_metrics"), 0, fast=True),
    Case(
        "nobody-listens",
        "nobody_listens",
        (r"ranks 0 and 1|ranks 0-1|ranks 0, 1", r"127\.0\.0\.1:29777"),
        seconds=75,
        issue="C9",
    ),
    Case("store-timeout", "store_timeout", (r"rank 1", "in tokenize")),
    Case("store-host", "store_host_raises", (_LABELS,), 0),
    # Two failures
    *(
        Case(
            f"two-fail-{first}{second}{'-two-nodes' if nodes == 2 else ''}",
            "two_fail",
            ("ValueError: the first of two failures",),
            first,
            never=("the second of two",),
            arguments=(str(first), str(second)),
            nodes=nodes,
            workers=2 // nodes,
            fast=nodes == 1,
        )
        for nodes in (1, 2)
        for first, second in ((0, 1), (1, 0))
    ),
    # Debuggers
    Case(
        "debugger",
        "debugger_left",
        ("ended by its debugger",),
        0,
        never=("BdbQuit",),
        shell='echo q >answers; exec "$@"',
        issue="C11",
        fast=True,
    ),
    Case(
        "breakpoint-forgotten",
        "breakpoint_forgotten",
        ("ended by its debugger",),
        1,
        never=("BdbQuit",),
        issue="C11",
        fast=True,
    ),
    # Hangs
    Case("hang-lock", "hang_lock", (_SILENCE, "rallyctl stacks|in update_cache"), seconds=90),
    Case("hang-sleep", "hang_sleep", (_SILENCE, "rallyctl stacks|in wait_for_lock_file"), seconds=90),
    Case("hang-native", "hang_native", (_SILENCE, "rallyctl stacks|in fused_kernel"), seconds=90),
    Case("hang-read", "hang_read", (_SILENCE, r"rank 1 .*(pipe|shard|read)"), seconds=90),
    Case("hang-collective", "hang_collective", (_SILENCE, "rallyctl stacks|in update_cache"), seconds=90),
    Case(
        "hang-spin",
        "hang_spin",
        (r"the job is hung", r"1 rank \(1\): .*hang_spin.py:[89]"),
        own_flags=("--hang-timeout=2", "--on-hang=fail"),
    ),
    Case(
        "hang-timeout",
        "hang_lock",
        (r"the job is hung", r"1 rank \(1\): update_cache"),
        own_flags=("--hang-timeout=2", "--on-hang=fail"),
    ),
    Case(
        "saves-slowly",
        "saves_slowly",
        ("ValueError: the optimizer has no state to save",),
        0,
        never=("the job is hung",),
        own_flags=("--hang-timeout=2", "--on-hang=fail"),
    ),
    Case(
        "console-unread",
        "writes_much",
        (r"console.*not.*read|not been read", "ranks 0"),
        source=Source.STATUS,
        shell='mkfifo console; exec 3<>console; exec "$@" >console 2>&1',
        seconds=90,
        issue="C10",
    ),
    # Nodes
    Case(
        "node-lost",
        "works",
        (r"lost|silent|no heartbeat|has gone",),
        act=Act(signal.SIGKILL, 1),
        nodes=2,
        workers=1,
        seconds=60,
    ),
    Case("stopped", "works", ("SIGTERM",), act=Act(signal.SIGTERM), fast=True),
    Case("stopped-group", "works", ("SIGTERM",), act=Act(signal.SIGTERM, group=True)),
    Case("interrupted", "works", ("SIGINT",), act=Act(signal.SIGINT)),
    Case(
        "preempted",
        "saves_on_stop",
        (r"all ranks .*exited with code 0",),
        act=Act(signal.SIGTERM, 1),
        nodes=2,
        workers=1,
        issue="C12",
    ),
    # Frameworks
    Case("accelerate", "by_accelerate", ("ValueError: batch 2 has no labels",), 1, seconds=60),
    Case("lightning", "by_lightning", ("ValueError: batch 2 has no labels",), 1, seconds=60),
    Case("trainer", "by_trainer", ("ValueError: the loss is nan after the first step",), 1, seconds=90),
    Case("deepspeed", "by_deepspeed", ("ValueError: batch 2 has no labels",), 1, seconds=120),
)

OPEN: dict[str, str] = {}
"""The cases that are not answered rightly yet, each with what is missing."""
