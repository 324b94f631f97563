"""What has to be done in a round before its workers can start (`monitors.Preparation`), where that is asked for.

Nodes tell each other where they are (`peer_exchange`), for variables of other frameworks (`worker_env`) and for the
mesh of `--preflight` (`mesh`); `socket_ifname` looks for the network interface. Nothing here is imported otherwise.
"""
