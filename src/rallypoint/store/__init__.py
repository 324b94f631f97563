"""Key-value stores with one interface, and a server for torch's TCPStore wire protocol.

`wire` has the requests; `server` is a store on a thread, which `plain` or the one in C (`compiled`) serves. `client`,
`filestore`, `prefix` and `plain.HashStore` are the stores that callers hold; `api` is what they have in common. Import
from the modules: this package imports none of them, so that nothing is imported that is not used.
"""
