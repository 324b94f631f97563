"""Rank 1 logs an exception as loguru does, with blank lines between the frames, logs another screen, and exits."""

import os
import sys
import time

ENTRY = """\
2024-11-28 17:05:15.552 | ERROR    | __main__:<module>:12 - An error has been caught in function '<module>', process 'MainProcess' (7):
Traceback (most recent call last):

> File "/home/ann/train.py", line 12, in <module>
    main()
    └ <function main at 0x7f0000000000>

  File "/home/ann/train.py", line 8, in main
    raise ValueError(f"batch {number} has no labels")
                              └ 7

ValueError: batch 7 has no labels
"""  # noqa: E501 - as it is written

if os.environ["RANK"] == "1":
    sys.stderr.write(ENTRY)
    for number in range(60):
        sys.stderr.write(f"2024-11-28 17:05:15.{number:03} | INFO     | __main__:close:{number} - a queue is closed\n")
    sys.exit(1)
time.sleep(60)
