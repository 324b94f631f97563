"""The reason is behind a blank line of the exception's message."""

import os
import time

if os.environ["RANK"] == "1":
    values = ["bf16", "fp8"]
    raise ValueError(
        f"2 validation errors for TrainingConfig\n\nprecision: {values[0]} and {values[1]} exclude each other"
    )
time.sleep(60)
