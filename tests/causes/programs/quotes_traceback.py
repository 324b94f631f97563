"""The message of rank 1's exception contains the traceback of another process, and continues after it."""

import os
import time

REMOTE = """Traceback (most recent call last):
  File "reader.py", line 7, in read
    raise KeyError("label")
KeyError: 'label'"""

if os.environ["RANK"] == "1":
    raise RuntimeError(f"the reader on host n7 has failed:\n{REMOTE}\nits log is /logs/reader-7")
time.sleep(60)
