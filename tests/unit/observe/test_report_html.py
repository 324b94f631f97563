"""The page of a report: whole, self-contained, and safe whatever a job has said."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rallypoint.observe.event_files import read_events
from rallypoint.observe.goodput import JobPhase, Report, agent_runs, report
from rallypoint.observe.report_html import report_html
from rallypoint.observe.report_svg import with_lost_work
from rallypoint.observe.report_text import report_fields, report_lines
from rallypoint.telemetry.agent_events import NodePhase
from tests.unit.observe.test_goodput import Node

RECORDING = Path(__file__).with_name("recording")
_VOID = {"meta", "br", "link", "img"}


class Elements(HTMLParser):
    """All elements with their attributes; each that is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def recorded() -> Report:
    return report(agent_runs(read_events([str(RECORDING)]).events["recorded"]))


def test_the_page_needs_nothing_else(recorded: Report) -> None:
    page = report_html(recorded)
    elements = Elements(page)
    tags = {tag for tag, _ in elements.found}
    assert tags.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "form", "base", "image", "use"})
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", page)
    names = {name for _, attributes in elements.found for name in attributes}
    assert not {each for each in names if each.startswith("on")} | (names & {"src", "href", "xlink:href", "action"})
    ids = {attributes["id"] for _, attributes in elements.found if "id" in attributes}
    assert set(re.findall(r"url\(#([a-z]+)\)", page)) == ids, "each pattern that is used is there"


def test_it_shows_each_node_each_round_and_each_failure(recorded: Report) -> None:
    elements = Elements(report_html(recorded))
    for each in recorded.rounds:
        assert each.detail in elements.text
    assert all(each.name in elements.text for each in recorded.nodes)
    marks = [tag for tag, attributes in elements.found if tag == "path" and "d" in attributes]
    assert len(marks) == 17, "each failure of a worker"
    assert f"{recorded.ratio:.4f}" in elements.text


def test_no_drawing_has_a_place_outside_or_a_number_that_is_none(recorded: Report) -> None:
    for tag, attributes in Elements(report_html(recorded)).found:
        if tag == "rect" and attributes.get("x"):
            x, width = float(attributes["x"] or 0), float(attributes["width"] or 0)
            assert 0 <= x <= x + width <= 1001


def test_what_is_shown_as_lost_work_is_what_was_lost(recorded: Report) -> None:
    spans = with_lost_work(recorded)
    assert sum(each.seconds for each in spans) == pytest.approx(recorded.wall)
    lost = sum(each.seconds for each in spans if each.phase == "lost_work")
    assert lost == pytest.approx(recorded.phases[JobPhase.RUNNING] - recorded.productive)


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", '"><img src=x onerror=y>', "\x1b[31m&amp;\x00", "日本 'n'"]
)
def test_what_a_job_says_is_escaped(name: str) -> None:
    node = Node(name).runs(1.0, 0).failed(2.0).over(2.0, "lost", name).phase(2.5, NodePhase.RENDEZVOUS).ends(4.0)
    found = report(agent_runs([_in_job(each, name) for each in node.events]))
    page = report_html(found)
    elements = Elements(page)
    assert {tag for tag, _ in elements.found}.isdisjoint({"script", "img"})
    assert "\x1b" not in page
    assert "\x00" not in page
    assert "\x1b" not in "".join(report_lines(found))


def _in_job(event: Any, name: str) -> Any:
    from msgspec.structs import replace

    return replace(event, job=name)


def test_a_job_without_a_round_and_a_moment_of_nothing() -> None:
    for node in (Node("a"), Node("a").runs(0.0, 0)):
        found = report(agent_runs(node.events))
        Elements(report_html(found))
        assert report_lines(found)
        assert report_fields(found)["effective_training_time_ratio"] == 0.0


def test_of_many_nodes_those_with_failures_are_shown_first() -> None:
    nodes = [Node(f"n{number}").runs(1.0, 0, 100) for number in range(100)]
    nodes[97].failed(5.0)
    found = report(agent_runs([each for node in nodes for each in node.ends(9.0).events]))
    page = report_html(found)
    assert ">n97<" in page
    assert page.count("<title>n") == 64
    assert "36 more nodes are left out" in page
