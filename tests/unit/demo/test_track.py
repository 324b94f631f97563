"""What is known of a run of the demo follows from what its workers tell."""

from __future__ import annotations

from rallypoint.demo.summary import summary
from rallypoint.demo.track import Phase, Track, finished, given_up, killed, told


def step(number: int) -> dict[str, object]:
    return {"event": "step", "rank": 0, "pid": 7, "step": number}


def broken() -> Track:
    """Killed 4 s after its start, at step 65."""
    return killed(told(Track("rallyrun", 120), step(65), 3.9), 4.0)


def test_a_step_that_was_under_way_is_not_the_next_step() -> None:
    track = told(broken(), step(66), 4.01)
    assert (track.phase, track.step, track.stopped) == (Phase.BROKEN, 65, None)


def test_it_has_gone_on_with_the_first_step_of_new_workers() -> None:
    track = broken()
    for event, now in (
        ({"event": "start", "rank": 0, "pid": 8}, 4.1),
        ({"event": "training", "rank": 0, "pid": 8, "step": 60}, 4.2),
        (step(61), 4.25),
        (step(62), 4.3),
    ):
        track = told(track, event, now)
    assert (track.phase, track.step, track.resumed, track.stopped) == (Phase.TRAINING, 62, 60, 0.25)


def test_the_table_says_what_was_not_seen() -> None:
    """A launcher that was given up has no time and no loss, and nothing is made up for it."""
    ours = finished(broken()._replace(stopped=0.1, loss=0.5), 7.0)
    theirs = given_up(broken()._replace(launcher="torchrun"), "has not gone on with the training within 60 s", 64.0)
    expected = finished(Track("rallyrun", 120, loss=0.5), 5.0)
    lines = summary(expected, [ours, ours._replace(launcher="torchrun", stopped=1.5)], [ours, theirs], 0.0)
    assert lines[0].split() == ["rallyrun", "torchrun"]
    assert lines[1].split()[-4:] == ["0.10", "s", "1.50", "s"]
    assert lines[2].endswith("0.10 s       never seen")
    assert lines[3].split("undisturbed)")[1].split() == ["7.0", "s,", "7.0", "s", "7.0", "s,", "-"]
    assert lines[4].endswith("as undisturbed      -, 0.500000")
    assert "default settings" in lines[6]
    assert "differ by 0:" in lines[7]


def test_without_torchrun_the_table_has_one_column() -> None:
    ours = finished(broken()._replace(stopped=0.1, loss=0.5), 7.0)
    assert summary(ours, [ours], [ours], 0.0)[0].split() == ["rallyrun"]
