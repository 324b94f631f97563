"""The account of a job's time, as one self-contained page: no script, no font, no address. Pure.

Laws:

1. The page can be mailed, archived and printed: drawings are SVG in the page, and patterns tell apart what colours do.
2. All text from a job is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from rallypoint.base.log import printable
from rallypoint.observe.goodput import Report, RoundEntry
from rallypoint.observe.report_svg import COLOURS, PATTERNS, breakdown, progress_chart, timeline
from rallypoint.observe.report_text import LOSS_WORDS, cause_words, percent, recovery_parts, summary
from rallypoint.observe.status import duration, moment

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 14px/1.45 system-ui, "DejaVu Sans", sans-serif; color: #1c2430; background: #fff; margin: 2rem auto;
  max-width: 1120px; padding: 0 1.25rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
p.lead { color: #5a6676; margin: 0 0 1.2rem; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: .7rem; margin: 0; }
dl div { border: 1px solid #d8dee6; border-radius: 6px; padding: .55rem .8rem; overflow-wrap: anywhere; }
dt { color: #5a6676; font-size: .8rem; } dd { margin: 0; font-size: 1.15rem; font-weight: 600; }
dd.long { font-size: .95rem; font-weight: 500; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid #e4e8ee; vertical-align: top; }
th { font-weight: 600; color: #5a6676; font-size: .82rem; } td.n, th.n { text-align: right; }
td.w { overflow-wrap: anywhere; max-width: 30rem; }
svg { width: 100%; height: auto; display: block; } svg text { font: 11px system-ui, "DejaVu Sans", sans-serif;
  fill: #1c2430; } svg text.dim { fill: #5a6676; }
ul.key { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; padding: 0; margin: .6rem 0 1rem; }
ul.key svg { width: 18px; height: 12px; display: inline-block; margin-right: .35rem; }
ul.notes { padding-left: 1.1rem; } .two { display: grid; grid-template-columns: 1fr 1fr; gap: 0 2.5rem; }
.scroll { overflow-x: auto; }
@media (max-width: 720px) { .two { grid-template-columns: 1fr; } }
@media print { @page { size: A4 landscape; margin: 12mm; } body { margin: 0; max-width: none; font-size: 11px; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } h2 { break-after: avoid; }
  tr, dl div { break-inside: avoid; } thead { display: table-header-group; } .scroll { overflow: visible; } }
"""

_KEY = {
    "productive": "productive",
    "lost_work": "lost work",
    "starting": "starting workers",
    "stopping": "stopping workers",
    "rendezvous": "rendezvous",
    "held_back": "held back",
    "down": "no agent",
}


def report_html(report: Report) -> str:
    """The page, whole."""
    return "\n".join(
        (
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(report.job)}: where the time went</title>",
            f"<style>{_STYLE}</style></head><body>",
            PATTERNS,
            *_body(report),
            "</body></html>",
            "",
        )
    )


def _body(report: Report) -> Iterator[str]:
    nodes = f"{len(report.nodes)} node{'' if len(report.nodes) == 1 else 's'}"
    yield f"<h1>{_text(report.job)}</h1>"
    began, ended = (f"{moment(each)[:19].replace('T', ' ')} UTC" for each in (report.began, report.began + report.wall))
    yield f'<p class="lead">{began} to {ended} · {nodes} · {len(report.rounds)} rounds</p>'
    yield f"<dl>{''.join(_tile(*each) for each in summary(report))}</dl>"
    if report.notes:
        yield "<h2>What to know</h2>"
        yield f'<ul class="notes">{"".join(f"<li>{_text(each, 1000)}</li>" for each in report.notes)}</ul>'
    yield "<h2>Where the time went</h2>"
    yield breakdown(report)
    yield _key()
    yield _times(report)
    yield "<h2>Rounds and nodes</h2>"
    yield from timeline(report)
    if len(report.progress) > 1:
        yield "<h2>Progress</h2>"
        yield progress_chart(report)
    if report.restarts:
        yield '<div class="two"><div><h2>Restarts by cause</h2>'
        yield _table(("cause", "#restarts"), [(cause_words(c), str(n)) for c, n in report.restarts_by_cause.items()])
        yield "</div><div><h2>Restarts by host</h2>"
        yield _table(("host", "#restarts"), [(host, str(n)) for host, n in report.restarts_by_host.items()])
        yield "</div></div>"
    if slowest := report.slowest_recoveries():
        yield "<h2>Slowest recoveries</h2>"
        yield _table(("#seconds", "#round", "why", "what it took"), [_recovery_row(each) for each in slowest])
    yield "<h2>All rounds</h2>"
    heads = ("#round", "#began", "#ran", "#nodes", "#workers", "ended by", "host", "#lost work", "#recovery", "detail")
    yield _table(heads, [_round_row(each) for each in report.rounds])


def _tile(name: str, value: str) -> str:
    long = ' class="long"' if len(value) > 24 else ""
    return f"<div><dt>{_text(name)}</dt><dd{long}>{_text(value)}</dd></div>"


def _key() -> str:
    items = (
        f'<li><svg viewBox="0 0 18 12"><rect width="18" height="12" fill="{COLOURS[name]}" stroke="#5a6676" '
        f'stroke-width=".5"/></svg>{words}</li>'
        for name, words in _KEY.items()
    )
    return f'<ul class="key">{"".join(items)}</ul>'


def _times(report: Report) -> str:
    rows = [("productive", f"{report.productive:.1f}", percent(report.productive, report.wall))]
    rows += [(LOSS_WORDS[loss], f"{each:.1f}", percent(each, report.wall)) for loss, each in report.lost.items()]
    return _table(("time", "#seconds", "#of wall time"), [*rows, ("wall time", f"{report.wall:.1f}", "")])


def _recovery_row(entry: RoundEntry) -> tuple[str, ...]:
    assert entry.recovery is not None
    why = f"{cause_words(entry.cause)}{f' on {entry.host}' if entry.host else ''}"
    return f"{entry.recovery.seconds:.2f}", str(entry.number), why, recovery_parts(entry.recovery)


def _round_row(entry: RoundEntry) -> tuple[str, ...]:
    recovery = f"{entry.recovery.seconds:.2f} s" if entry.recovery else ""
    return (
        str(entry.number),
        f"+{duration(entry.started)}",
        f"{entry.running:.1f} s",
        str(entry.nodes),
        str(entry.world_size),
        cause_words(entry.cause) if entry.cause else "",
        entry.host,
        f"{entry.lost:.1f} s" if entry.cause or entry.lost else "",
        recovery,
        entry.detail,
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; a head that begins with # has numbers below it."""
    numeric = [each.startswith("#") for each in heads]

    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = (' class="n"' if number else ' class="w"' for number in numeric)
        return "".join(f"<{tag}{kind}>{_text(each)}</{tag}>" for kind, each in zip(kinds, row, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = cells("th", [each.removeprefix("#") for each in heads])
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _text(text: str, most: int = 255) -> str:
    return escape(printable(text, most))
