"""Rank 1 raises, closes its connection and cleans up; rank 0 notices the closed connection and dies first."""

import os
import socket
import time

if os.environ["RANK"] == "0":
    with socket.socket(socket.AF_UNIX) as peer:
        while peer.connect_ex("peer"):
            time.sleep(0.01)
        if not peer.recv(1):
            raise ConnectionResetError("Connection closed by peer")
server = socket.socket(socket.AF_UNIX)
server.bind("peer")
server.listen()
try:
    with server.accept()[0]:
        raise ValueError("batch 7 has no labels")
finally:
    time.sleep(2)  # the tear-down of what it holds
