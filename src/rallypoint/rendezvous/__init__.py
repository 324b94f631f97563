"""The agreement of all agents on who takes part.

One pure core (`state`, `operations`, `decisions`) is run by two executors: the coordinator inside the embedded server,
and the shared-state executor over any backend that can compare and set. A handler talks to either through a `Link`.
"""
