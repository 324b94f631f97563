"""The agreement of all agents on who takes part.

One pure core (`state`, `operations`, `decisions`) is run by the coordinator, inside the embedded server, or by a
shared-state link, over any backend that can compare and set. A handler talks to either through a `Link`.
"""
