"""Workers that are functions (contract section 6.1).

    context    `FunctionContext`: the workers of one start
    worker     what a worker is given and what it returns, and what runs in its process
    forked     start method fork: a copy of the agent

Workers of spawn and forkserver are new processes below the reaper, which finds whatever they leave; where torch forks
the latter from a server, they import the main module each. Those of fork are below the agent, which does not find what
left the worker's session and lost its parents.
"""
