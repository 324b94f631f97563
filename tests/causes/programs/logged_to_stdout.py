"""The logger of rank 1 writes its fatal error to standard output, and the program exits with 1."""

import logging
import os
import sys
import time

logging.basicConfig(stream=sys.stdout, format="%(asctime)s %(levelname)s %(message)s")
if os.environ["RANK"] == "1":
    try:
        {"train": 1}["validation"]
    except KeyError:
        logging.critical("training failed", exc_info=True)
        sys.exit(1)
time.sleep(60)
