#!/usr/bin/env python3
"""Runs a command when the cloud says that it will take this machine away: a spot instance, or maintenance.

    python3 notices.py aws -- rallyctl drain node0:29400 "$(hostname)"

Run one beside each agent, as the same user. It asks the cloud's metadata service every few seconds, runs the command
once, and ends with its exit code. It needs Python alone. What is asked, by the cloud's documentation:

    aws     spot/instance-action and events/maintenance/scheduled, with a token (Instance Metadata Service v2)
    google  instance/preempted and instance/maintenance-event
    azure   Scheduled Events: Preempt, Terminate, Reboot, Redeploy
"""

import argparse
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping

_TIMEOUT = 5.0
_LARGEST = 1024 * 1024
ADDRESSES = {
    "aws": "http://169.254.169.254",
    "google": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}
_ENDS_AZURE = {"Preempt", "Terminate", "Reboot", "Redeploy"}


def _ask(url: str, headers: Mapping[str, str], method: str = "GET") -> str:
    """The answer of the metadata service; empty where it has none (404)."""
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    # Without a proxy: the address is this machine's own.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT) as answer:
            return answer.read(_LARGEST).decode(errors="replace")
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return ""
        raise


def aws(base: str) -> str:
    """Why this machine will be taken away; empty if it will not."""
    token = _ask(f"{base}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "300"}, "PUT")
    headers = {"X-aws-ec2-metadata-token": token}
    if action := _ask(f"{base}/latest/meta-data/spot/instance-action", headers):
        found = json.loads(action)
        return f"spot instance: {found.get('action')} at {found.get('time')}"
    events = json.loads(_ask(f"{base}/latest/meta-data/events/maintenance/scheduled", headers) or "[]")
    active = [event for event in events if event.get("State", "active") == "active"]
    return f"maintenance: {active[0].get('Code')} at {active[0].get('NotBefore')}" if active else ""


def google(base: str) -> str:
    """The same on Google Cloud."""
    headers, instance = {"Metadata-Flavor": "Google"}, f"{base}/computeMetadata/v1/instance"
    if _ask(f"{instance}/preempted", headers).strip() == "TRUE":
        return "preempted"
    event = _ask(f"{instance}/maintenance-event", headers).strip()
    return f"maintenance: {event}" if event not in ("", "NONE", "MIGRATE_ON_HOST_MAINTENANCE") else ""


def azure(base: str) -> str:
    """The same on Azure."""
    answer = _ask(f"{base}/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})
    events = [event for event in json.loads(answer or "{}").get("Events", ()) if event.get("EventType") in _ENDS_AZURE]
    return f"{events[0]['EventType']} not before {events[0].get('NotBefore')}" if events else ""


CLOUDS: Mapping[str, Callable[[str], str]] = {"aws": aws, "google": google, "azure": azure}


def main() -> int:
    """Wait for a notice, run the command, and return its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cloud", choices=CLOUDS)
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="between questions (default: 5)")
    parser.add_argument("--metadata", metavar="URL", help="address of the metadata service (default: the cloud's)")
    parser.add_argument("command", nargs="+", help="what to run when this machine will be taken away")
    options = parser.parse_args()
    base, failed = options.metadata or ADDRESSES[options.cloud], False
    while True:
        try:
            why = CLOUDS[options.cloud](base)
            failed = False
        except (OSError, ValueError) as error:  # it does not answer, or not as documented
            why = ""
            if not failed:
                print(f"notices: {base} cannot be asked, and is asked again: {error}", file=sys.stderr, flush=True)
            failed = True
        if why:
            print(f"notices: {why}; running {' '.join(options.command)}", file=sys.stderr, flush=True)
            return subprocess.run(options.command, check=False).returncode
        time.sleep(options.every)


if __name__ == "__main__":
    sys.exit(main())
