"""Workers that are functions (contract section 6.1).

context   `MultiprocessContext`: the workers of one start
payload    what a worker is handed and what it gives back: one file in memory each
worker    what runs in the worker's process, however that was started
forked    start method fork: a copy of the agent
served    start method forkserver, the agent's end
server    start method forkserver, the process whose copies the workers are
script    `--run-path`: a script as a function

             started by           below the reaper   what nothing ends
spawn        the reaper         yes                  nothing
forkserver   the server, which    yes                  nothing
             the reaper starts
fork         the agent            no                   what left the worker's session and lost its parents
"""
