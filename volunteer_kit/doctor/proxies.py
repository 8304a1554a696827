"""Which proxies the environment names, whether they answer, and what of the run is asked through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from volunteer_kit.doctor.finding import Finding

if TYPE_CHECKING:
    from volunteer_kit.http_client import Proxy


def proxies(urls: Sequence[str]) -> Finding:
    """:param urls: what the run cannot do without: its authority, the Hub"""
    from volunteer_kit.http_client import host_of, proxies_named, proxy_for, why_proxy_fails

    named = {proxy: why_proxy_fails(proxy) for proxy in proxies_named()}
    through = {host_of(url): proxy_for(url) for url in urls}
    return verdict(named, through)


def verdict(named: Mapping[Proxy, str | None], through: Mapping[str, Proxy | None]) -> Finding:
    """:param named: the environment's proxies -> why one fails; None: it takes connections
    :param through: host -> the proxy that it is asked through; None: it is asked directly"""
    if not named:
        return Finding("proxies", "ok", "the environment names none")
    told = [f"{proxy.variable}={proxy.shown} {why or 'answers'}" for proxy, why in named.items()]
    told += [f"{host} {f'through {proxy.variable}' if proxy else 'directly'}" for host, proxy in through.items()]
    text = f"{'; '.join(told)}; this machine's own addresses directly"
    dead = {proxy: why for proxy, why in named.items() if why}
    used = {host: proxy for host, proxy in through.items() if proxy in dead}
    ways = [proxy.way_out(f"//{host}") for host, proxy in used.items() if proxy is not None]
    ways = ways or [f"unset {' '.join(proxy.variable for proxy in dead)}"] * bool(dead)
    level = "problem" if used else "warning" if dead else "ok"
    return Finding("proxies", level, text, "\n".join(ways))
