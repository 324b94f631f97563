"""Key-value stores with one interface, and a server for torch's TCPStore wire protocol.

`wire` and `decoder` (bytes to requests and back) and `table` (requests to replies) are pure; `serving`, `polling` and
`server` put them behind sockets. `client`, `hashstore`, `filestore` and `prefix` are the stores that callers hold;
`api` is what they have in common. Import from the modules: this package imports none of them, so that nothing is
imported that is not used.
"""
