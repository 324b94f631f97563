"""Whole jobs in virtual time, with faults from a seed. `python -m tests.sim --seed N` replays one.

scenario   a seed becomes plain data: settings, nodes, timed faults
world      the heap of events, processes with clocks of their own, the trace
network    connections that delay, hold back and break
server     the control server's process: production arbiter, hub and handshake
link       a node's line to it: production handshake, codec and holding
etcd       an etcd that can be away, slow, out of reach, or lose its answers
candidate  a node's standing in it; term, its time as the arbiter; strand, what a thread that waits is here
agent      a node's process: production policy and handler; crew and stores are made up
audit      what must always be true, checked as things happen
faults     what each kind of fault does
job        one scenario from its first to its last event
shrink     the smallest scenario that still goes wrong, and its story
tally      many seeds side by side
teeth      bugs that must be found
"""
