"""In the place of `torch.distributed.elastic.rendezvous.utils`."""

from __future__ import annotations

from rallypoint.base.endpoint import parse_endpoint

__all__ = ["parse_rendezvous_endpoint"]


def parse_rendezvous_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """Host and port of an endpoint; localhost where it is empty.

    Raises:
        UserError: the host or the port cannot be one.
    """
    host, port = parse_endpoint(endpoint, default_port)
    return host, port
