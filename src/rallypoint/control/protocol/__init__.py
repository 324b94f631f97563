"""Messages of the control plane's connections, as pure data: no sockets, clocks or randomness."""
