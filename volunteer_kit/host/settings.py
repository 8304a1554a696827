"""What a host is told, remembered from start to start, and what cannot be."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from volunteer_kit.addressing import in_url, loopback
from volunteer_kit.data.addresses import AddressRefused, web_address, web_link
from volunteer_kit.host.ports import port_of

AUTHORITY_PORT, DASHBOARD_PORT, PEER_PORT = 8000, 8001, 31337


class HostError(OSError):
    """A host that cannot start, or go on. Its text says what to do."""


@dataclass(frozen=True)
class HostSettings:
    """How a run stands in the net. None and () mean: as at the last start, or the default.

    :param host_maddrs: where the first peer listens
    :param announce_maddrs: addresses of the first peer that others should dial: the public ones behind a router
    :param initial_peers: of other first peers of the same run
    :param port: of the authority, in clear text on loopback, or for the world with a certificate
    :param dashboard_port: on loopback
    :param public_url: under which others reach the authority, https://NAME
    :param dashboard_url: under which others reach the dashboard, if not PUBLIC_URL/dashboard/
    :param tls_cert: certificate chain (PEM) with which the authority serves https itself
    :param behind_proxy: something else serves https under public_url and passes on to `port`
    :param database: of the authority, if not SQLite in the folder
    :param push_to: ORG/NAME on the Hub, for checkpoints, model card, notebook and kit; "": no longer
    :param checkpoint_every: epochs from one checkpoint to the next
    :param tracker: where metrics go as well, "trackio" or "wandb"
    """

    host_maddrs: tuple[str, ...] = ()
    announce_maddrs: tuple[str, ...] = ()
    initial_peers: tuple[str, ...] = ()
    port: int | None = None
    dashboard_port: int | None = None
    public_url: str | None = None
    dashboard_url: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    behind_proxy: bool | None = None
    database: str | None = None
    push_to: str | None = None
    checkpoint_every: int | None = None
    tracker: str | None = None

    @classmethod
    def remembered(cls, saved: dict[str, Any]) -> HostSettings:
        """From host.json; what is not of the right kind there is as if it were missing."""
        found = {}
        for field in fields(cls):
            value = saved.get(field.name)
            if isinstance(value, list):
                value = tuple(str(item) for item in value)
            if value is not None and isinstance(value, _KINDS[field.name]):
                found[field.name] = value
        return cls(**found)

    def over(self, earlier: HostSettings) -> HostSettings:
        """These, and where nothing was said the earlier ones. TLS, a proxy and the address belong together."""
        given = {name: value for name, value in asdict(self).items() if value not in (None, ())}
        if {"tls_cert", "behind_proxy"} & given.keys():
            earlier = replace(earlier, tls_cert=None, tls_key=None, behind_proxy=None)
        return replace(earlier, **given)


_KINDS: dict[str, type] = {
    **dict.fromkeys(("host_maddrs", "announce_maddrs", "initial_peers"), tuple),
    **dict.fromkeys(("port", "dashboard_port", "checkpoint_every"), int),
    **dict.fromkeys(("public_url", "dashboard_url", "tls_cert", "tls_key", "database"), str),
    **dict.fromkeys(("push_to", "tracker"), str),
    "behind_proxy": bool,
}


def authority_url(settings: HostSettings) -> str:
    """The address of the authority that belongs into the run file. Raises HostError: who would be shown a login page
    in clear text, or could not reach it at all, is told before anything starts."""
    port = settings.port or AUTHORITY_PORT
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise HostError("--tls-cert and --tls-key belong together: give both, or --behind-proxy.")
    for path in filter(None, (settings.tls_cert, settings.tls_key)):
        if not Path(path).is_file():
            raise HostError(f"There is no file {path} (--tls-cert, --tls-key).")
    if not settings.public_url:
        if settings.tls_cert:
            raise HostError(f"Say under which name the certificate is valid: --public-url https://NAME:{port}")
        if any(is_for_others(address) for address in settings.announce_maddrs):
            raise HostError(_needs_https("Others are told to dial this machine", settings))
        return f"http://{in_url(loopback())}:{port}"
    url = _checked("--public-url", settings.public_url, web_address)
    parts = urlsplit(url)
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        raise HostError(_needs_https(f"{url} is not https", settings))
    if parts.scheme == "http" and parts.hostname not in (loopback(), "localhost"):
        here = f"http://{in_url(loopback())}:{parts.port or port}"
        raise HostError(f"The authority listens on {loopback()}, not on {url}.\n1. Type: --public-url {here}")
    if parts.scheme == "https" and not settings.tls_cert and not settings.behind_proxy:
        raise HostError(_needs_https(f"Nothing was said about who serves https for {url}", settings))
    return url


def dashboard_address(settings: HostSettings) -> str:
    """Where others reach the dashboard; "" if beside the authority. Raises HostError."""
    return _checked("--dashboard-url", settings.dashboard_url, web_link) if settings.dashboard_url else ""


def require_help_url(url: str) -> None:
    """Raises HostError unless people can open it; "" does."""
    if url:
        _checked("help_url", url, web_link)


def _checked(option: str, url: str, check: Callable[[str], str]) -> str:
    try:
        return check(url)
    except AddressRefused as why:
        shown = "" if "@" in url else f" {url[:200]!r}"  # there may be a password in it
        like = "help_url: https://example.org/chat" if option == "help_url" else f"{option} https://run.example.org"
        raise HostError(f"{option}{shown} does not do: {why}.\n1. It should look like this: {like}") from None


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_for_others(maddr: str) -> bool:
    """Could another machine dial it?"""
    parts = maddr.split("/")
    return len(parts) > 2 and not is_loopback(parts[2])


def _needs_https(what: str, settings: HostSettings) -> str:
    name = in_url(urlsplit(settings.public_url or "").hostname or "run.example.org")
    port = settings.port or AUTHORITY_PORT
    return (
        f"{what}, and volunteers show their login to the authority: it has to be https.\n"
        f"1. With a name and Caddy (it gets certificates by itself), in another terminal:\n"
        f"     sudo caddy reverse-proxy --from {name} --to {in_url(loopback())}:{port}\n"
        f"   and here: --public-url https://{name} --behind-proxy\n"
        f"2. With a certificate of your own:\n"
        f"   --public-url https://{name}:{port} --tls-cert chain.pem --tls-key key.pem\n"
        "3. For machines of your own only, where everybody may join: --no-authority"
    )


def listening_port(maddrs: Sequence[str]) -> int | None:
    """The TCP port that they name; None if it is any."""
    return next((port for port in map(port_of, maddrs) if port), None)
