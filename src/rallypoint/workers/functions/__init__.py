"""Workers that are functions (contract section 6.1).

context             `MultiprocessContext`: the workers of one start
payload             what a worker is handed and what it gives back: one file in memory each
worker              what runs in the worker's process, however that was started
forked              start method fork: a copy of the agent
fork_server_client  start method forkserver, the agent's end
fork_server         start method forkserver, the process whose copies the workers are
script              `--run-path`: a script as a function

| start method | started by | below the reaper | what nothing ends |
|---|---|---|---|
| spawn | the reaper | yes | nothing |
| forkserver | the fork server, which the reaper starts | yes | nothing |
| fork | the agent | no | what left the worker's session and lost its parents |
"""
