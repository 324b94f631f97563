"""The page, the stream and the metrics of running jobs, in a real browser and scraped by a real Prometheus."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import threading
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rallypoint.observe.goodput import agent_runs, report
from rallypoint.observe.report import read_events, report_json
from tests.jobs.browser import PROGRAM, browser
from tests.jobs.launching import RALLYCTL, TIMEOUT, Job, Launcher
from tests.jobs.nodes import all_end, c10d
from tests.jobs.test_control_plane import outside
from tests.ports import free_port
from tests.waiting import until

needs_browser = pytest.mark.skipif(PROGRAM is None, reason="needs a browser (Debian: apt-get install chromium)")
RECORDING = Path(__file__).parents[1] / "unit" / "observe" / "recording"
PROMETHEUS = shutil.which("prometheus")
EXITS = 50
"""Workers that end one after the other."""
TOKEN = "a-token-of-these-tests-0123456789"


def fetched(port: int, path: str, token: str = "") -> tuple[int, str]:
    """Status and body of what is served on this machine."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers), timeout=TIMEOUT
        ) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def serve_pages(rallyrun: Launcher, port: int, http: int) -> Job:
    """A control plane with pages."""
    server = rallyrun.command([*RALLYCTL, "serve", f"--endpoint=127.0.0.1:{port}", f"--http={http}"])
    server.until_err("control plane listens at")
    return server


def token_file(rallyrun: Launcher) -> Path:
    path = rallyrun.folder / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return path


@needs_browser
def test_the_page_shows_what_runs_and_outlives_a_restart_of_the_control_plane(rallyrun: Launcher) -> None:
    port, http = free_port(), free_port()
    server = serve_pages(rallyrun, port, http)
    with browser() as page:
        page.open(f"http://localhost:{http}/")
        page.wait_for_text("0 jobs", "#job")
        job = outside(rallyrun, port, "2", "--max-restarts=3")
        nodes = [job.start("A"), job.start("B")]
        page.wait_for_text("running", "#phase")  # of the one job that there is
        page.wait_for_text("live", "#link")
        page.wait_for("document.querySelectorAll('#nodes tbody tr').length === 2")
        job.say("fail-B-0")
        page.wait_for("document.querySelector('#facts').innerText.startsWith('round\\n1')")
        page.wait_for_text("exited with code 1", "#failures")
        shown = json.loads(fetched(http, "/status.json?job=job")[1])
        assert (shown["round"], shown["restarts"]["failures"], shown["restarts"]["left"]) == (1, 1, 2)
        assert page.value("document.querySelectorAll('#timeline rect').length") >= 2
        for node in nodes:
            node.comes_up(1, starts=2)
            page.wait_for_text(node.last(1)[0]["pid"], "#nodes")
        text = fetched(http, "/metrics")[1]
        assert 'rallypoint_job_restarts_total{job_id="job",reason="failure"} 1.0' in text
        assert 'rallypoint_job_phase{job_id="job",phase="running"} 1.0' in text
        server.signal(signal.SIGTERM)
        server.ends()
        page.wait_for_text("reconnecting", "#link")
        assert page.text("#phase") == "running"  # what was seen last stays
        serve_pages(rallyrun, port, http)
        page.wait_for_text("live", "#link")
        page.wait_for("document.querySelectorAll('#nodes tbody tr').length === 2")
        job.say("finish")
        all_end(nodes, 0)
        page.wait_for_text("succeeded", "#phase")
        page.wait_for_text("ended", "#link")
        assert not page.said


@needs_browser
def test_the_page_draws_the_json_of_a_report(rallyrun: Launcher) -> None:
    http = free_port()
    serve_pages(rallyrun, free_port(), http)
    files = read_events([str(RECORDING)])
    made = report_json(report(agent_runs(files.events["recorded"]), files.notes))
    with browser() as page:
        page.open(f"http://localhost:{http}/")
        page.wait_for_text("No job is running at this control plane.", "#jobs")
        assert page.value("document.querySelector('#choose').hidden && !document.querySelector('#jobs th')")
        page.open(f"http://localhost:{http}/?report")
        page.wait_for("!document.querySelector('#choose').hidden")
        page.value(f"showReport({made})")
        page.wait_for_text("succeeded", "#phase")
        assert page.value("document.querySelectorAll('#timeline rect.round').length") == 21
        assert page.value("document.querySelectorAll('#failures tbody tr').length") == 17
        assert not page.said


@needs_browser
def test_an_agent_shows_the_job_to_who_has_the_token(rallyrun: Launcher) -> None:
    port = free_port()
    env = {"TORCHELASTIC_HEALTH_CHECK_PORT": str(port), "RALLYPOINT_HTTP_TOKEN_FILE": str(token_file(rallyrun))}
    job = c10d(rallyrun, "1")
    node = job.host("A", env=env)
    node.comes_up(1)
    assert fetched(port, "/healthz")[0] == 200
    assert fetched(port, "/readyz")[0] == 200
    for path in ("/status.json", "/metrics", "/events"):
        code, body = fetched(port, path)
        assert (code, "error" in json.loads(body)) == (401, True)
    shown = json.loads(fetched(port, "/status.json", TOKEN)[1])
    assert (shown["job"], shown["phase"], len(shown["nodes"])) == ("job", "running", 1)
    with browser() as page:
        page.open(f"http://127.0.0.1:{port}/")
        page.wait_for("!document.querySelector('#ask').hidden")
        assert page.value("document.querySelector('#one').hidden")
        page.value(f"document.querySelector('#token').value = '{TOKEN}'; document.querySelector('#ask button').click()")
        page.wait_for_text("running", "#phase")
        page.wait_for("document.querySelector('#ask').hidden")
        assert not page.said
    job.say("finish")
    all_end([node], 0)


@pytest.mark.skipif(PROMETHEUS is None, reason="needs Prometheus (Debian: apt-get install prometheus)")
def test_prometheus_scrapes_an_agent(rallyrun: Launcher) -> None:
    port, web = free_port(), free_port()
    path = token_file(rallyrun)
    env = {"TORCHELASTIC_HEALTH_CHECK_PORT": str(port), "RALLYPOINT_HTTP_TOKEN_FILE": str(path)}
    job = c10d(rallyrun, "1", "--max-restarts=2")
    node = job.host("A", env=env)
    node.comes_up(1)
    job.say("fail-A-0")
    node.comes_up(1, starts=2)
    scrape: dict[str, Any] = {"job_name": "agents", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
    scrape["authorization"] = {"credentials_file": str(path)}
    config = rallyrun.folder / "prometheus.json"  # JSON is YAML
    config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}))
    flags = [f"--config.file={config}", f"--storage.tsdb.path={rallyrun.folder / 'tsdb'}"]
    rallyrun.command([str(PROMETHEUS), *flags, f"--web.listen-address=127.0.0.1:{web}"])

    def ask(query: str) -> list[dict[str, Any]]:
        code, text = fetched(web, f"/api/v1/query?{urllib.parse.urlencode({'query': query})}")
        assert code == 200, text
        found: list[dict[str, Any]] = json.loads(text)["data"]["result"]
        return found

    until(lambda: _answers(web) and ask("rallypoint_recovery_seconds_count"), "it has scraped the agent", TIMEOUT)
    difference = ask("abs(sum(rallypoint_phase_seconds_total) - sum(rallypoint_agent_uptime_seconds))")
    assert float(difference[0]["value"][1]) < 1e-3
    values = {
        each["metric"]["__name__"]: each["value"][1] for each in ask('{__name__=~"rallypoint_.*",phase="",reason=""}')
    }
    assert values["rallypoint_round"] == "1"
    assert values["rallypoint_rounds_total"] == "2"
    assert values["rallypoint_restarts_remaining"] == "1"
    assert values["rallypoint_recovery_seconds_count"] == "1"
    assert values["rallypoint_job_workers"] == "1"  # the coordinator is in this agent
    assert ask('rallypoint_restarts_total{reason="failure"} == 1')
    assert ask('rallypoint_job_restarts_total{reason="failure"} == 1')
    job.say("finish")
    all_end([node], 0)


def _answers(port: int) -> bool:
    try:
        return fetched(port, "/-/ready")[0] == 200
    except OSError:
        return False


def test_scrapes_take_no_exit_code_from_the_agent(rallyrun: Launcher) -> None:
    """Each of many workers ends well, at a moment of its own, while the metrics of the agent are read all the time."""
    port, over = free_port(), threading.Event()
    script = rallyrun.script("import os, time\ntime.sleep(1 + int(os.environ['RANK']) / 25)")
    job = rallyrun(
        "--standalone", f"--nproc-per-node={EXITS}", script, env={"TORCHELASTIC_HEALTH_CHECK_PORT": str(port)}
    )

    def scrape() -> int:
        count = 0
        while not over.is_set():
            with suppress(OSError, http.client.HTTPException):  # before it listens, and after the end
                count += fetched(port, "/metrics")[0] == 200
        return count

    with ThreadPoolExecutor(4) as pool:
        scrapes = [pool.submit(scrape) for _ in range(4)]
        try:
            code = job.ends()
        finally:
            over.set()
    assert code == 0, job.err
    assert sum(each.result() for each in scrapes) > EXITS / 2
