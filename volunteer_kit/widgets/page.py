"""Progress and terms as HTML. Everything that came from outside is escaped; there is no script."""

from __future__ import annotations

import base64
from html import escape
from urllib.parse import urlsplit

from volunteer_kit.widgets import words
from volunteer_kit.widgets.chart import loss_chart
from volunteer_kit.widgets.progress import PICTURES, WARNINGS, Picture, Progress
from volunteer_kit.widgets.style import STYLE
from volunteer_kit.widgets.terms import Terms

PNG = b"\x89PNG\r\n\x1a\n"
LARGEST_PICTURE = 512 * 1024  # bytes; larger ones would be sent through the notebook again and again


def progress_page(progress: Progress) -> str:
    """All of it in one block, with the style: the final picture, or a page of its own."""
    return STYLE + live(progress) + notes(progress) + plan(progress) + pictures(progress.pictures)


def live(progress: Progress) -> str:
    """What changes all the time: state, bar, numbers, curve. The same height in every state."""
    p = progress
    return (
        f'<div class="vk" data-vk-state="{p.state}">'
        f'<div class="vk-run"><span><b>{_text(p.run_id, 60)}</b> {_text(p.description)}</span>'
        f"<span>{_help(p.help_url)}</span></div>"
        f'<div class="vk-state"><span class="vk-dot vk-{words.tone(p)}"></span>'
        f"<span>{escape(words.headline(p))}</span></div>"
        f'<div class="vk-meaning">{escape(words.meaning(p))}</div>'
        f"{_bar(p)}{_facts(p)}{loss_chart(words.points(p))}</div>"
    )


def notes(progress: Progress) -> str:
    """Warnings, newest first, and how long this stay is."""
    warnings = "".join(f"<div>{escape(line)}</div>" for line in words.warnings(progress)[:WARNINGS])
    stay = f'<div class="vk-small">{escape(words.stay(progress))}</div>'
    return f'<div class="vk"><div class="vk-warnings">{warnings}</div>{stay}</div>'


def plan(progress: Progress) -> str:
    """Device and plan with their why, folded."""
    line, why = words.plan(progress), words.plain(progress.why, 1500)
    if not line:
        return ""
    why = f"<p>{escape(why)}</p>" if why else ""
    return f'<div class="vk"><details><summary>How this machine works: {escape(line)}</summary>{why}</details></div>'


def pictures(found: list[Picture]) -> str:
    """The run's latest pictures with their captions; what is no PNG is left out."""
    shown = [p for p in found[:PICTURES] if p.png.startswith(PNG) and len(p.png) <= LARGEST_PICTURE]
    if not shown:
        return ""
    figures = "".join(_figure(picture) for picture in shown)
    title = f"Drawn by the model at step {words.number(shown[0].epoch)}, from the captions beneath"
    return f'<div class="vk"><div class="vk-small">{title}</div><div class="vk-pictures">{figures}</div></div>'


def terms(terms: Terms) -> str:
    """The first screen's text."""
    rows = []
    for heading, text in terms.points():
        is_notice = heading == terms.platform.title and terms.platform.name != "own"
        notice = ' class="vk-notice"' if is_notice else ""
        rows.append(f"<dt>{escape(heading)}</dt><dd{notice}>{escape(text)}</dd>")
    more = f'<div class="vk-small">{_help(terms.help_url)}</div>' if terms.help_url else ""
    return f'<div class="vk"><h3>{escape(terms.title)}</h3><dl class="vk-terms">{"".join(rows)}</dl>{more}</div>'


def agreed(terms: Terms) -> str:
    """The terms, folded, once they are accepted."""
    inner = "".join(f"<p><b>{escape(heading)}</b>: {escape(text)}</p>" for heading, text in terms.points())
    return f'{STYLE}<div class="vk"><details><summary>What you agreed to</summary>{inner}</details></div>'


def browser_login(link: str, code: str) -> str:
    """Where to log in with the browser, and the code to enter there."""
    where = _link(link, "Log in at the Hugging Face Hub") or "Log in at the Hugging Face Hub"
    return f'<div class="vk"><div>{where} with the code</div><div class="vk-code">{_text(code, 40)}</div></div>'


def token_hint(url: str, or_else: bool, checked_by: str = "") -> str:
    """What to put into the token's field, where to get it, and who sees it."""
    first = "Or paste" if or_else else "Log in: paste"
    where = _link(url, "make one here")
    seen_by = f"the Hub and to {_text(checked_by, 100)}, the run's authority" if checked_by else "the Hub"
    return (
        f'<div class="vk"><div>{first} a token of the Hugging Face Hub: “fine-grained”, no box ticked ({where})</div>'
        f'<div class="vk-small">It is kept in memory, never shown or written, and goes to {seen_by}.</div></div>'
    )


def lines(texts: list[str], kind: str = "small") -> str:
    """Plain lines; kind "error" in red."""
    return f'<div class="vk"><div class="vk-{kind}">{"<br>".join(_text(text, 600) for text in texts)}</div></div>'


def _bar(progress: Progress) -> str:
    if progress.state in words.ENDED:
        return ""
    label, share = words.bar(progress)
    inner = '<i class="vk-unknown"></i>' if share is None else f'<i style="width:{100 * share:.1f}%"></i>'
    return f'<div class="vk-small">{escape(label)}</div><div class="vk-bar">{inner}</div>'


def _facts(progress: Progress) -> str:
    cards = []
    for fact in words.facts(progress):
        label, value, note = (escape(text) for text in fact)
        cards.append(f'<div class="vk-fact"><span>{label}</span><b>{value}</b><span>{note}</span></div>')
    return f'<div class="vk-facts">{"".join(cards)}</div>'


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode()
    caption = _text(picture.caption, 120)
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{caption}"><figcaption>{caption}</figcaption></figure>'
    )


def _text(text: str, longest: int = words.LONGEST) -> str:
    return escape(words.plain(text, longest))


def _help(url: str) -> str:
    return _link(url, "Help")


def _link(url: str, text: str) -> str:
    """Empty for anything but http and https: a link must not run anything. What is no address is shown as it is."""
    url = words.plain(url, 2000)
    try:
        scheme = urlsplit(url).scheme
    except ValueError:
        return escape(f"{text}: {words.plain(url, 100)} (no address)")
    if scheme not in ("http", "https"):
        return ""
    return f'<a href="{escape(url)}" target="_blank" rel="noopener noreferrer">{escape(text)}</a>'
