"""The parameters of a rendezvous backend, and the `--rdzv-conf` text (contract section 4.2)."""

from __future__ import annotations

from rallypoint.base.errors import UsageError, UserError
from rallypoint.base.light_typing import Any, NamedTuple
from rallypoint.control.protocol.ranges import NUMBERS, SECONDS, is_in_range, range_of

C10D_PORT, ETCD_PORT = 29400, 2379
"""The default ports of the control plane and of etcd."""


class Backend(NamedTuple):
    """A backend of ours.

    `creator` creates its handler, as `module:function`. `port` is the endpoint's default port; None if the endpoint
    must name one. `on_etcd`: its coordinator is elected on etcd.
    """

    creator: str
    port: int | None
    on_etcd: bool = False


_BACKENDS = "rallypoint.rendezvous.backends"
BACKENDS = {
    "c10d": Backend(f"{_BACKENDS}.embedded:create_handler", C10D_PORT),
    "etcd": Backend(f"{_BACKENDS}.etcd:create_handler", ETCD_PORT, on_etcd=True),
    "static": Backend(f"{_BACKENDS}.static:create_handler", None),
    "etcd-v2": Backend(f"{_BACKENDS}.etcd:create_handler", ETCD_PORT, on_etcd=True),
}
"""The backends with our coordinator, by name; plug-ins have none."""

ON_ETCD = tuple(name for name, backend in BACKENDS.items() if backend.on_etcd)
"""Names of the backend with an elected coordinator."""

_TRUE = frozenset({"1", "true", "t", "yes", "y"})
_FALSE = frozenset({"0", "false", "f", "no", "n"})


class RendezvousParameters:
    """All parameters of a backend.

    Args:
        backend: the backend's name.
        endpoint: the place of its control plane, in the backend's own form.
        run_id: the job's id.
        min_nodes: the minimum number of nodes in a round.
        max_nodes: the maximum number of nodes in a round.
        local_addr: the address at which other nodes reach this one; None to detect it.
        kwargs: the backend's own options, stored in `config`; times are in seconds.

    Raises:
        UserError: the backend is missing, or the numbers of nodes are impossible.
    """

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not backend:
            raise UserError("no rendezvous backend is set; choose one, such as c10d or static")
        if min_nodes < 1:
            raise UserError(f"a rendezvous cannot have a minimum of {min_nodes} nodes; use 1 or more")
        if not is_in_range("max_nodes", max_nodes):
            raise UserError(f"a rendezvous cannot have {max_nodes} nodes; use at most {range_of('max_nodes').maximum}")
        if max_nodes < min_nodes:
            raise UserError(
                f"a rendezvous cannot have a minimum of {min_nodes} and a maximum of {max_nodes} nodes; use a maximum "
                f"of {min_nodes} or more"
            )
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.local_addr = local_addr
        self.endpoint_flag = "--rdzv-endpoint"
        """Flag or variable that set the endpoint, for messages."""
        self.endpoint_given = True
        """Whether the user set the endpoint; otherwise it is the default."""
        self.config: dict[str, Any] = kwargs

    def get(self, key: str, default: Any = None) -> Any:
        """Return the option `key` unchanged, or `default`."""
        return self.config.get(key, default)

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """Return the option `key` as a whole number, or `default`.

        Raises:
            UserError: the value is not a whole number.
        """
        value = self.get(key, default)
        if value is None:
            return None
        try:
            return int(value)
        except (TypeError, ValueError, OverflowError):
            raise UserError(
                f"rendezvous option {key}={value!r} is not a whole number; use a value such as {key}=30 in --rdzv-conf"
            ) from None

    def get_as_seconds(self, key: str, default: float) -> float:
        """Return the option `key`, unknown to torchrun, in seconds, or `default`.

        Raises:
            UsageError: the value is not a number, or out of range (up to a day).
        """
        least, most = NUMBERS.get(key, SECONDS)
        value = self.get(key, default)
        try:
            seconds = float(value)
        except (TypeError, ValueError):
            seconds = -1.0
        if not least <= seconds <= most:
            raise UsageError(
                f"rendezvous option {key}={value!r} is not a number of seconds from {least:g} to {most:g}; use a value "
                f"such as {key}=30 in --rdzv-conf"
            )
        return seconds

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """Return the option `key` as a bool, or `default`.

        Accepts bools, 0 and 1, and the texts 1, true, t, yes, y; 0, false, f, no, n, in upper or lower case.

        Raises:
            UserError: the value is none of these.
        """
        value = self.get(key, default)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, (int, str)):
            text = str(value).lower()
            if text in _TRUE:
                return True
            if text in _FALSE:
                return False
        raise UserError(f"rendezvous option {key}={value!r} is not a boolean; write {key}=true or {key}=false")


def parse_rdzv_conf(text: str) -> dict[str, str]:
    """Parse `key=value,key=value`. Blanks around keys and values are dropped; a later key replaces an earlier one.

    A value can contain `=` but no comma. An empty text has no keys.

    Raises:
        UserError: a part has no key or no value.
    """
    options: dict[str, str] = {}
    for part in text.split(",") if text.strip() else []:
        key, _, value = (side.strip() for side in part.partition("="))
        if not key:
            raise UserError(
                f"rendezvous options {text!r} contain a part without a name, {part!r}; write key=value,key=value"
            )
        if not value:
            raise UserError(f"rendezvous options {text!r} set no value for {key!r}; write {key}=value")
        options[key] = value
    return options
