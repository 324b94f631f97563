"""Expands Slurm's lists of hosts, such as `n[1-3,07],rack[1-2]gpu[01-16],login`.

Laws:

1. A list that `scontrol show hostnames` accepts in this grammar expands to the same hosts in the same order:

       list   = [item] { separator [item] }       separators: comma, space, tab, line end, outside of brackets
       item   = text | { text "[" ranges "]" } [text]
       ranges = range { "," range }
       range  = number | number "-" number

   Leading zeros of a range's first number determine its width: `[08-10]` is 08, 09, 10. Like scontrol, do not accept
   steps (`[1-9/2]`). Accept a text after the last bracket, although not every version of Slurm does.
   2. With several brackets, the last one varies fastest, and of the others the one nearest to the end slowest. This is
   odd, but Slurm's order.
   3. The text is untrusted: work and result are bounded for any text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

MAX_HOSTS = 65536
"""Maximum number of hosts in a list, as in Slurm."""
MAX_TEXT = 1 << 17
"""Maximum number of characters in a list: no environment variable is longer."""
MAX_BRACKETS = 16

_PART = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,20})(?:-([0-9]{1,20}))?", re.ASCII)


class HostlistError(ValueError):
    pass


def expand(text: str) -> list[str]:
    """Expand a list to its hosts, in order, with repetitions. Raises HostlistError if the text is malformed or has more
    than `MAX_HOSTS` hosts.
    """
    if len(text) > MAX_TEXT:
        raise HostlistError(f"it has {len(text)} characters, but at most {MAX_TEXT} are allowed")
    hosts: list[str] = []
    for item in _items(text):
        hosts += _expand_item(item, MAX_HOSTS - len(hosts))
    return hosts


def _items(text: str) -> Iterator[str]:
    start, depth = 0, 0
    for place, character in enumerate(text):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        elif depth == 0 and character in ", \t\n\r":
            if place > start:
                yield text[start:place]
            start = place + 1
        if depth not in (0, 1):
            raise HostlistError(f"the brackets at character {place + 1} do not match")
    if depth:
        raise HostlistError("a bracket is not closed")
    if start < len(text):
        yield text[start:]


def _expand_item(item: str, room: int) -> Iterator[str]:
    pieces = _PART.split(item)  # text, ranges, text, ..., text
    texts, brackets = pieces[::2], pieces[1::2]
    if len(brackets) > MAX_BRACKETS:
        raise HostlistError(f"{item[:60]!r} has {len(brackets)} brackets, but at most {MAX_BRACKETS} are allowed")
    numbers: list[list[str]] = []
    for bracket in brackets:
        numbers.append(_numbers(bracket, room))
        room //= len(numbers[-1])
    if room < 1:
        raise HostlistError(f"it expands to more than {MAX_HOSTS} hosts")
    slow_to_fast = [*reversed(range(len(numbers) - 1)), len(numbers) - 1] if numbers else []
    for combination in product(*(numbers[bracket] for bracket in slow_to_fast)):
        by_place = dict(zip(slow_to_fast, combination, strict=True))
        yield texts[0] + "".join(by_place[place] + texts[place + 1] for place in range(len(numbers)))


def _numbers(bracket: str, most: int) -> list[str]:
    numbers: list[str] = []
    for part in bracket.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise HostlistError(f"{part[:60]!r} in brackets is neither a number nor a range such as 1-8")
        first = match[1]
        low, high = int(first), int(match[2] or first)
        if low > high:
            raise HostlistError(f"the range {part} is descending")
        if high - low >= most - len(numbers):
            raise HostlistError(f"it expands to more than {MAX_HOSTS} hosts")
        numbers += [str(number).zfill(len(first)) for number in range(low, high + 1)]
    return numbers
