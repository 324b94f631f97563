"""A Rust program of rank 1 panics."""

import os
import sys
import time

if os.environ["RANK"] == "1":
    print("thread 'main' panicked at src/loader.rs:42:9:\nshard 7 has no labels", file=sys.stderr)
    print("note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace", file=sys.stderr)
    sys.exit(101)
time.sleep(60)
