"""The message of rank 1's exception has the traceback of another process in it, and goes on behind that."""

import os
import time

REMOTE = """Traceback (most recent call last):
  File "reader.py", line 7, in read
    raise KeyError("label")
KeyError: 'label'"""

if os.environ["RANK"] == "1":
    raise RuntimeError(f"the reader on host n7 has failed:\n{REMOTE}\nits log is /logs/reader-7")
time.sleep(60)
