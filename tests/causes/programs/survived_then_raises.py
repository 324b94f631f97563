"""Rank 1 logs exceptions that it survives, and then raises one that is fatal."""

import logging
import os
import time

if os.environ["RANK"] == "1":
    for attempt in range(3):
        try:
            raise TimeoutError(f"attempt {attempt} to log in")
        except TimeoutError:
            logging.exception("trying again")
    raise PermissionError("the token of the hub has expired")
time.sleep(60)
