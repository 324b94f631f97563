"""Rank 1 raises, and then asyncio reports a task whose exception was never retrieved."""

import asyncio
import os
import time


async def push_metrics() -> None:
    raise ConnectionError("no metrics server")


async def main() -> None:
    metrics = asyncio.ensure_future(push_metrics())
    await asyncio.sleep(0)
    raise ValueError(f"batch 7 has no labels, {metrics.done()}")


if os.environ["RANK"] == "1":
    asyncio.run(main())
time.sleep(60)
