"""What a host looks at before it starts: whether what it asks over HTTP can be asked from this machine."""

from __future__ import annotations

from volunteer_kit.http_client import blamed_on_proxy

NOBODY_COMES_IN = "Until that is mended, the authority cannot ask the Hub who a volunteer is, so it lets nobody in."


def proxy_troubles(authority_url: str, dashboard_url: str) -> list[str]:
    """One text for each proxy of the environment that is needed and does not work, with the way out."""
    from huggingface_hub import constants

    needed = {constants.ENDPOINT: NOBODY_COMES_IN, authority_url: "", dashboard_url: ""}
    found: dict[str, str] = {}
    for url, consequence in needed.items():
        if trouble := blamed_on_proxy(url):
            found.setdefault(trouble.proxy.variable, f"{trouble}\n{consequence}".rstrip())
    return list(found.values())
