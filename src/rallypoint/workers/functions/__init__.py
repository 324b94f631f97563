"""Workers that are functions (contract section 6.1).

context             `FunctionContext`: the workers of one start
payload             what a worker is given and what it returns: one file in memory each
worker              what runs in the worker's process, however that was started
forked              start method fork: a copy of the agent
fork_server_client  start method forkserver, the agent's end
fork_server         start method forkserver, the process whose copies the workers are
script              `--run-path`: a script as a function

Workers of spawn and forkserver are below the reaper, which finds whatever they leave. Those of fork are below the
agent, which does not find what left the worker's session and lost its parents.
"""
