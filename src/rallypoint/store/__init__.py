"""Key-value stores with one interface, and a server for torch's TCPStore wire protocol.

`wire` contains the requests; `server` is a store on a thread, served by `plain` or by the code in C (`compiled`).
Callers use the stores in `client`, `filestore`, `prefix` and `plain.HashStore`; `api` is their common part. Import from
the modules: this package imports none of them, so that nothing unused is imported.
"""
