"""Whether this agent is well, for whoever asks over HTTP (contract section 5.10).

`progress_probe` is what the agent leaves to be seen, `answers` turns a request into a reply (pure), `serving` does
it on the
process's loop thread, `server` is what its owner holds, and `check` has the names that torch's users know. The room is
handed callables and plain data, and knows no agent.
"""
