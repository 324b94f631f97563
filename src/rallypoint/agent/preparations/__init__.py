"""Preparations of a round before its workers can start (`monitors.Preparation`), if they are requested.

Nodes exchange their addresses (`peer_exchange`), for variables of other frameworks (`worker_env`) and for the
mesh of `--preflight` (`mesh`); `socket_ifname` looks for the network interface. Nothing here is imported otherwise.
"""
