"""The messages of the control plane's connections, as data: pure, without sockets, clocks or randomness."""
