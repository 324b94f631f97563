"""Rank 0 serves its metrics at a port that another process uses."""

import os
import socket
import time


def serve_metrics(port: int) -> None:
    socket.create_server(("127.0.0.1", port))


if os.environ["RANK"] == "0":
    other = socket.create_server(("127.0.0.1", 0))
    serve_metrics(other.getsockname()[1])
time.sleep(60)
