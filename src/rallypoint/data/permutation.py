"""Random permutations, identical to those of `torch.randperm` on a CPU with a generator of the same seed.

So workers with torch's sampler and workers with ours can share an epoch.
"""

from __future__ import annotations

from random import Random

_STATE_SIZE = 624
_WORD = 0xFFFFFFFF


def permutation(n: int, seed: int) -> list[int]:
    """The numbers from 0 to `n - 1`, shuffled.

    Args:
        n: how many; fewer than 2**32 / 20, because torch shuffles larger ranges differently.
        seed: only the lowest 32 bits are used, as in torch.
    """
    shuffled = list(range(n))
    draw = _generator(seed).getrandbits
    for place in range(n - 1):
        other = place + draw(32) % (n - place)
        shuffled[place], shuffled[other] = shuffled[other], shuffled[place]
    return shuffled


def _generator(seed: int) -> Random:
    """Python's Mersenne twister, seeded as by the algorithm's authors; `Random(seed)` seeds it differently."""
    words = [seed & _WORD]
    for place in range(1, _STATE_SIZE):
        last = words[-1]
        words.append((1812433253 * (last ^ (last >> 30)) + place) & _WORD)
    made = Random()
    made.setstate((3, (*words, _STATE_SIZE), None))
    return made
