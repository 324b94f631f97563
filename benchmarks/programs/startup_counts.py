"""What a recorded start-up (`startup_record`) asked of its store: `startup_counts FILE ...`.

For each recording the requests of one rank by kind and key, with numbers in keys as #, and how many of all requests
read a key that is set once and never changes: those that a copy of the store nearer to the worker could answer.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.recording import Recording, read
from rallypoint.store.plain import Decoder
from rallypoint.store.wire import Op

_READS = {Op.GET, Op.WAIT, Op.CHECK, Op.MULTI_GET}
_WRITES = {Op.SET, Op.APPEND, Op.COMPARE_SET, Op.DELETE_KEY}
_COUNTS = {Op.ADD, Op.BARRIER}


def requests(recording: Recording) -> Iterator[tuple[Op, list[bytes]]]:
    """Each request, and the keys that it names."""
    for dialogue in recording.dialogues:
        decoder = Decoder()
        for message in dialogue.messages:
            decoder.feed(message)
            while (found := decoder.next()) is not None:
                op, fields = found
                named = fields[0] if fields else []
                yield op, [named] if isinstance(named, bytes) else list(named) if isinstance(named, list) else []


def main(*paths: str) -> None:
    """Print what each recording has."""
    for path in paths:
        recording = read(Path(path))
        asked = list(requests(recording))
        writes = Counter(key for op, keys in asked for key in keys if op in _WRITES)
        counted = {key for op, keys in asked for key in keys if op in _COUNTS}
        fixed = {key for key, times in writes.items() if times == 1} - counted
        near = sum(op in _READS and bool(keys) and fixed.issuperset(keys) for op, keys in asked)
        print(f"{path}: {recording.ranks} ranks, {len(recording.dialogues)} connections, {len(asked)} requests")
        print(f"  {near / len(asked):.1%} read keys that are set once")
        kinds = Counter((op.name, re.sub(rb"\d+", b"#", b" ".join(keys)).decode()) for op, keys in asked)
        for (name, keys), times in kinds.most_common():
            print(f"  {times / recording.ranks:8.2f} a rank  {name} {keys}")


if __name__ == "__main__":
    main(*sys.argv[1:])
