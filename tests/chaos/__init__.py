"""Random faults from a seed against a real job of three agents: `make chaos`.

faults.py       which faults, drawn from a seed. Pure
invariants.py   what must hold, over a record of what workers have written. Pure
job.py          the job, its control plane, and how each fault is done to them
__main__.py     plays them, and prints a table
"""
