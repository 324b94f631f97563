"""Runs the corpus of failures and prints the score: `python -m tests.causes [--tool TOOL] [NAME...]`.

Runs one case at a time. With both tools, each case runs under one and then under the other.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from tests.causes.cases import CASES, OPEN
from tests.causes.reading import Score, in_short
from tests.causes.running import TOOLS, missing, run


def main() -> int:
    """Print a table of scores; 1 if rallyrun's differ from what `OPEN` says, or if a job of it has left something."""
    parser = argparse.ArgumentParser(prog="python -m tests.causes", description=__doc__)
    parser.add_argument(
        "--tool",
        action="append",
        choices=TOOLS,
        help="rallyrun (default), torchrun, or ft_launcher where that is on the path; may be repeated",
    )
    parser.add_argument("--fast", action="store_true", help="only the half that `make test` runs")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="keep what each console has shown")
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of cases, or of the issue's; all where none is")
    args = parser.parse_args()
    tools = args.tool or ["rallyrun"]
    chosen = [case for case in CASES if not args.names or {case.name, case.issue} & set(args.names)]
    unknown = set(args.names) - {name for case in CASES for name in (case.name, case.issue)}
    if unknown:
        parser.error(f"there is no case {', '.join(sorted(unknown))}")
    print(f"| case | {' | '.join(tools)} | what it said |\n|{'---|' * (len(tools) + 2)}")
    counts = {tool: Counter[str]() for tool in tools}
    bad = 0
    for case in chosen:
        if args.fast and not case.fast:
            continue
        reason = missing(case)
        row, notes = [], []
        for tool in tools:
            if reason:
                row.append("skipped")
                notes.append(reason)
            else:
                outcome = run(case, tool)
                row.append(outcome.score)
                misleading = outcome.score is not Score.RIGHT
                text = next((text for text in outcome.said if text), "nothing")
                notes += [f"{tool}: {in_short(text)}"] if misleading else []
                notes += [f"LEFT: {'; '.join(outcome.left)}"] if outcome.left else []
                surprising = misleading is not (case.name in OPEN) and not case.by_chance
                bad += bool(outcome.left) or (tool == "rallyrun" and surprising)
                for node, console in enumerate(outcome.consoles if args.keep else []):
                    args.keep.mkdir(parents=True, exist_ok=True)
                    (args.keep / f"{case.name}.{tool}.{node}").write_text(console)
            counts[tool][row[-1]] += 1
        name = f"{case.name} ({case.issue})" if case.issue else case.name
        print(f"| {name} | {' | '.join(row)} | {'; '.join(notes).replace('|', '/')[:300]} |", flush=True)
    for tool, count in counts.items():
        print(f"\n{tool}: {', '.join(f'{number} {what}' for what, number in count.most_common())}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
