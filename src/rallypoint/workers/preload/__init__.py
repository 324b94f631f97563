"""Preloaded workers: a zygote imports what is slow to import once, and restarted workers are forked from it.

    command           which worker commands can be forked, and where they find their modules (pure)
    environment       which variables an import may have seen, so that a worker with others is not forked (pure)
    zygote_client     the agent's end of one zygote
    copies its copies that wait to become workers
    manager           the zygotes of one agent, one after the other, and whether a worker is forked
    hook/ the `sitecustomize` of an interpreter that becomes a zygote
    zygote the zygote itself: import, check, fork
    imports what it imports, and what that would import later
    script_imports    what a script imports, read from its source
    environ_recorder  what the imports read of the environment and changed in it
    loop_filters which of all variables a loop over them keeps
    fork_checks       whether a process may be forked after the imports
    threads which libraries own the threads that prevent a fork
    child_init makes a fork like a fresh interpreter
    late_imports what workers import after the fork, for debugging

Those from `hook/` on run in the zygote, whose modules only the worker may see: they use built-in modules and their
own folder's files, and leave nothing in `sys.modules`.

Laws:

1. A zygote is the worker's own command line, held in its `site` phase: argv, flags, `sys.path`, `__main__` and the way
   to the exit code are the interpreter's own and not an imitation.
2. A worker that could differ from a fresh one starts without preloading, with one line that says why.
3. A zygote never runs the script: on any error it ends.
4. A worker's parent is the reaper, as that of one that is not forked; with the zygote's death, no worker ends.
"""
