"""What a host says to the person who runs it."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from volunteer_kit.addressing import in_url, loopback
from volunteer_kit.host.folder import HostFolder
from volunteer_kit.host.settings import HostSettings, is_loopback
from volunteer_kit.run_sections import AuthorityConfig
from volunteer_kit.ways_in import Offer, Way, ways_in


def welcome(
    run_id: str,
    offer: Offer,
    settings: HostSettings,
    folder: HostFolder,
    addresses: Sequence[str],
    down: Sequence[str],
    authority: AuthorityConfig,
) -> list[str]:
    """The link to give away, the ways in that work, and what is for the host.

    :param offer: what the host gives to those who want to join
    :param addresses: of the first peer, as they stand in the run file
    :param down: parts that do not start, and are tried again now and then
    """
    url = offer.url
    lines = [f"The run {run_id} is up.", "", "For volunteers, one link:", f"  {url}", ""]
    lines.append("Their ways in, which stand on that page too:" if offer.draws else "For members:")
    for way in ways_in(offer):
        lines += [f"  {line}" if line else "" for line in _told(way)]
    lines += ["", "For you:"]
    lines.append(f"  moderators {url}/moderate")
    lines.append(f"  dashboard  {offer.dashboard_url}")
    lines.append(f"             {dashboard_url(settings)} on this machine, by a server of its own")
    lines += [f"  peer       {address}" for address in addresses]
    lines.append(f"  folder     {folder.path}   (keep a backup of all but logs/, and show it to nobody)")
    lines += ["", *who_may_join(authority)]
    if is_loopback(urlsplit(url).hostname or ""):
        lines += ["", "Only this machine can join: for others the authority needs https and a name, see --public-url."]
    elif offer.draws and not offer.repo:
        lines += ["", _no_colab(offer)]
    if down:
        lines += ["", f"Without: {', '.join(down)}. The reason is above."]
    return [*lines, "", "Ctrl-C stops it; the same command starts it again as it was."]


def _told(way: Way) -> list[str]:
    """The title, and beside it what to open or to type."""
    rows = [*([way.link] if way.link else []), *way.lines]
    if not way.lines:
        rows.append(f"({way.note})")
    return [f"{way.title if number == 0 else '':<13} {row}" for number, row in enumerate(rows)]


def _no_colab(offer: Offer) -> str:
    if offer.push_to:
        return f"The link for Colab is told once the notebook is at {offer.push_to} on the Hub, for everybody to read."
    return "A link that opens the notebook in Colab needs the Hub: --push-to ORG/NAME"


def who_may_join(authority: AuthorityConfig) -> list[str]:
    """Lines on the people whom the authority admits, and on its moderators."""
    admitted = []
    if authority.organization:
        admitted.append(f"members of {authority.organization}")
    if authority.users:
        admitted.append(f"the accounts that the run file names ({len(authority.users)})")
    if authority.moderators:
        admitted.append("the people whom moderators add")
    if authority.open:
        admitted = ["everybody who has an account at the Hub (authority.open in the run file)"]
    lines = [f"The authority admits {', and '.join(admitted) or 'no one yet: see authority.users in the run file'}."]
    if not authority.moderators:
        lines.append("A ban needs a moderator. In the run file, authority: moderators: [YOUR NAME AT THE HUB]")
    return lines


def dashboard_url(settings: HostSettings) -> str:
    """The dashboard's own server, on this machine."""
    return f"http://{in_url(loopback())}:{settings.dashboard_port}/"
