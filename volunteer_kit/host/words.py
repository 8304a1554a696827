"""What a host says to the person who runs it."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from volunteer_kit.host.folder import HostFolder
from volunteer_kit.host.settings import HostSettings, is_loopback
from volunteer_kit.run_sections import AuthorityConfig


def welcome(
    run_id: str,
    url: str,
    settings: HostSettings,
    folder: HostFolder,
    addresses: Sequence[str],
    down: Sequence[str],
    authority: AuthorityConfig,
    draws: bool = True,
) -> list[str]:
    """The links to give away, and what is for the host.

    :param addresses: of the first peer, as they stand in the run file
    :param down: parts that do not start, and are tried again now and then
    """
    link = f"{url}/run.yaml"
    parts = urlsplit(url)
    is_open = parts.scheme == "http" and not is_loopback(parts.hostname or "")  # readable and changeable on the way
    lines = [f"The run {run_id} is up.", "", "For volunteers, any of these:"]
    if not draws:
        lines[-1] = "For members, with data of their own:"
        lines.append("  from volunteer_kit import swarm_trainer")
        lines.append(f'  swarm_trainer("{link}", train_dataset=...{", allow_http=True" * is_open}).train()')
    else:
        lines.append(f'  notebook   join_swarm("{link}"{", allow_http=True" * is_open})')
        lines.append(f"  terminal   volunteer-kit join {'--allow-http ' * is_open}{link}")
    if settings.repository and draws:
        page = f"https://colab.research.google.com/github/{settings.repository}/blob/main/notebooks/join.ipynb"
        lines.append(f'  Colab      {page}   with RUN = "{link}"')
    lines += ["", "For you:"]
    lines.append(f"  moderators {url}/moderate")
    lines.append(f"  dashboard  {dashboard_url(settings)}")
    lines += [f"  peer       {address}" for address in addresses]
    lines.append(f"  folder     {folder.path}   (keep a backup of all but logs/, and show it to nobody)")
    lines += ["", *who_may_join(authority)]
    if is_loopback(urlsplit(url).hostname or ""):
        lines += ["", "Only this machine can join: for others the authority needs https and a name, see --public-url."]
    if down:
        lines += ["", f"Without: {', '.join(down)}. The reason is above."]
    return [*lines, "", "Ctrl-C stops it; the same command starts it again as it was."]


def who_may_join(authority: AuthorityConfig) -> list[str]:
    """And who can put somebody out."""
    who = []
    if authority.organization:
        who.append(f"members of {authority.organization}")
    if authority.users:
        who.append(f"{len(authority.users)} named in the run file")
    if authority.moderators:
        who.append("whom moderators add")
    if authority.open:
        who = ["everybody who has an account at the Hub (authority.open in the run file)"]
    lines = [f"Who may join: {', and '.join(who) or 'nobody yet: see authority.users in the run file'}."]
    if not authority.moderators:
        lines.append("Nobody can ban: name yourself in the run file, authority: moderators: [YOUR NAME AT THE HUB]")
    return lines


def dashboard_url(settings: HostSettings) -> str:
    return settings.dashboard_url or f"http://127.0.0.1:{settings.dashboard_port}/"
