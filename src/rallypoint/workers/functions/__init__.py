"""Workers that are functions (contract section 6.1).

    context    `FunctionContext`: the workers of one start
    worker     the call that a worker receives, the value that it returns, and the program in its process
    forked     start method fork: a copy of the agent

Workers of spawn and forkserver are new processes below the reaper, which finds everything that they leave. (torch forks
forkserver workers from a server; here each imports the main module itself.) Workers of fork are below the agent, which
cannot find processes that left the worker's session and lost their parents.
"""
