"""Two tasks of rank 0 fail at once: an exception group."""

import asyncio
import os
import time


async def fetch(shard: int) -> None:
    raise TimeoutError(f"shard {shard} was not served")


async def main() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(fetch(3))
        group.create_task(fetch(4))


if os.environ["RANK"] == "0":
    asyncio.run(main())
time.sleep(60)
