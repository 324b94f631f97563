"""`rallyctl demo`: a job that loses a worker, then a node, and ends as if nothing had happened; torchrun beside it.

`worker` is the program that is trained, in plain Python; `peers` is how its workers add up numbers. `job` runs
launchers and hears of their workers, `scenarios` kills, `track` is what is known of each run, `summary` what to make of
all of them (both pure), and `account` and `screen` show it, as lines or redrawn in place.
"""
