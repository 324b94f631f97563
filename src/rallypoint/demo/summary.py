"""Summarizes all runs, as lines of text. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.demo.track import Track

_LABEL, _COLUMN = 42, 17


def summary(expected: Track, workers: Sequence[Track], nodes: Sequence[Track], difference: float) -> list[str]:
    """A table with a column a launcher, and a sentence.

    Args:
        expected: the run that was undisturbed.
        workers: those that lost a worker, one a launcher, ours first.
        nodes: those that lost a node.
        difference: the greatest of final losses of ours.
    """
    beside = ["By turns on this machine, each with its default settings."] if len(workers) > 1 else []
    return [
        _row("", [each.launcher for each in workers]),
        _row("a worker killed, until the next step", [_stopped(each) for each in workers]),
        _row("a node lost, until the next step", [_stopped(each) for each in nodes]),
        _row(
            f"the whole job ({_seconds(expected)} undisturbed)",
            [_both(*each) for each in zip(workers, nodes, strict=True)],
        ),
        _row("final loss", [_loss(expected, *each) for each in zip(workers, nodes, strict=True)]),
        "",
        *beside,
        f"The final losses differ by {difference:.1g}: the job lost a worker, then a node,",
        f"and ended as if nothing had happened, after {_seconds(workers[0])} and {_seconds(nodes[0])} "
        f"instead of {_seconds(expected)}.",
    ]


def _row(label: str, values: Sequence[str]) -> str:
    return f"{label:{_LABEL}}" + "".join(f"{value:>{_COLUMN}}" for value in values).rstrip()


def _stopped(track: Track) -> str:
    return f"{track.stopped:.2f} s" if track.stopped is not None else "never seen"


def _seconds(track: Track) -> str:
    return f"{track.seconds:.1f} s" if track.seconds is not None else "-"


def _both(worker: Track, node: Track) -> str:
    return f"{_seconds(worker)}, {_seconds(node)}"


def _loss(expected: Track, *others: Track) -> str:
    losses = {f"{each.loss:.6f}" if each.loss is not None else "-" for each in others}
    return "as undisturbed" if losses == {f"{expected.loss:.6f}"} else ", ".join(sorted(losses))
