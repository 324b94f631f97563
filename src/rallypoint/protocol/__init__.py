"""What the control plane's connections carry, as data: pure, without sockets, clocks or randomness."""
