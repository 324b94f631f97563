"""A function of rank 1 survives exceptions, which it logs; the program ends for another reason much later."""

import logging
import os
import time

logging.basicConfig(level=logging.INFO)


def push_metrics(step: int) -> bool:
    try:
        raise ConnectionError("no metrics server")
    except ConnectionError:
        logging.exception("the metrics of step %d are lost", step)
        return False


if os.environ["RANK"] == "1":
    push_metrics(1)
    for step in range(int(os.environ.get("STEPS", "3"))):
        logging.info("step %d, loss 2.31", step)
    raise SystemExit("no checkpoint may be written: the quota is used up")
time.sleep(60)
