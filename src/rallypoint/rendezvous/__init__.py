"""The agreement of all agents on the nodes of a round.

The coordinator, in its server, or a shared-state link, over any backend that can compare and set, runs one set of pure
rules (`control.membership`). A handler talks to either through a `Link`.
"""
