"""Whole jobs in virtual time, with faults from a seed. `python -m tests.sim --seed N` replays one.

scenario      a seed becomes plain data: settings, nodes, timed faults
world         the heap of events, processes with clocks of their own, the trace
network       connections that delay, hold back and break
server        the control server's process: production coordinator, dispatcher and handshake
link          a node's connection to it: production handshake, codec and resume state
etcd          an etcd that can be away, slow, out of reach, or lose its answers
election      a node as a candidate and as the leader: the production machine and journal
coroutine     what a thread that waits is here
agent         a node's process: production policy and handler
workers       the workers of each node, made up
stores        the worker stores of each node, made up
audit         what must always be true, checked as things happen
ground_truth  what has really happened, for the audit to compare with
faults        what each kind of fault does
job           one scenario from its first to its last event
shrink        the smallest scenario that still goes wrong, and its trace
runner        many seeds side by side
mutations     bugs that must be found
"""
