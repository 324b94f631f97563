"""Variables that frameworks other than torch look for in a worker's environment (`--worker-env`).

`kinds` is the table of all kinds; each kind is a pure function in a file of its own. `install` puts them into an
agent: ports are reserved and addresses exchanged in each round (`preparations.peer_exchange`) before its workers start.
"""
