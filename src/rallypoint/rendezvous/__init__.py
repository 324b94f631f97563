"""How all agents agree on a round's nodes.

One set of pure rules (`control.membership`) is run by the coordinator in its server, or by a shared-state link over any
backend that can compare and set. A handler talks to either through a `Link`.
"""
