"""Intended differences from torch, and what torch has only since some version.

A pattern is matched with the whole of `fact: about`. In EXPLAINED it has the first cell of its row in
docs/contract/10-differences.md. A difference that neither table explains is a defect: ours, or the contract's.
"""

from __future__ import annotations

SINCE: dict[str, str] = {
    r".*(--log-line-prefix-template|--print-completion).*": "2.14",
    r"name .*ErrorHandler\.maybe_enrich_signal_failure_message.*": "2.14",
    r"name .*ErrorHandler\.(record_success|set_entrypoint_fn_name).*": "2.15",
    r".*cas_backoff_max_seconds.*": "2.15",
    r".*HIP_VISIBLE_DEVICES.*": "2.15",
}
"""Of the versions from 2.13 on: what older ones do not have. docs/contract/README.md has this from 2.6 on."""

EXPLAINED: dict[str, str] = {
    r"flag --version: ": "`--version`",
    r"name .*\.PContext: parameter [67] is .*": "the filters of `PContext`, and `subprocess_handlers`",
    r"name .*Context: has no (filtered_std(out|err)|subprocess_handlers)": (
        "the filters of `PContext`, and `subprocess_handlers`"
    ),
    r"name .*\.DynamicRendezvousHandler: parameter [0-4] is .*": "`DynamicRendezvousHandler(...)`",
    r"name .*\.FileTimerServer: has no (run_once|is_process_running|(register|clear|get_expired)_timers)": (
        "methods of `FileTimerServer`"
    ),
}
