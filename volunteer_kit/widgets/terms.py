"""What a volunteer reads before anything runs, and what the owner of the platform allows."""

from __future__ import annotations

from dataclasses import dataclass, field

from volunteer_kit.platforms import PlatformName, platform_name
from volunteer_kit.widgets.words import duration, number, plain, size

PLATFORM_WORDS: dict[PlatformName, str] = {
    "colab": (
        "You are on Google Colab. Its terms forbid distributed computing workers on runtimes without paid compute "
        "units: go on only if you have bought some, and keep this tab as your way of using it. One account per person."
    ),
    "kaggle": (
        "You are on Kaggle. Read its terms (kaggle.com/terms) and decide yourself whether they allow this; your weekly "
        "GPU hours are used up. One account per person."
    ),
    "binder": (
        "You are on Binder, which is given away for short looks: take part in the demo for some minutes, not overnight."
    ),
    "own": "Make sure that the owner of this machine and of its network agrees.",
}
PLATFORM_TITLES: dict[PlatformName, str] = {
    "colab": "Google Colab",
    "kaggle": "Kaggle",
    "binder": "Binder",
    "own": "This machine",
}


@dataclass(frozen=True)
class Platform:
    """Where this runs, and what its owner allows."""

    name: PlatformName

    @property
    def title(self) -> str:
        return PLATFORM_TITLES[self.name]

    @property
    def words(self) -> str:
        return PLATFORM_WORDS[self.name]


def detect_platform() -> Platform:
    """Of this process."""
    return Platform(platform_name())


@dataclass(frozen=True)
class Terms:
    """What is agreed to by pressing Start. A number that is None is not spoken of."""

    run_id: str
    description: str = ""  # of the run, one sentence
    help_url: str = ""
    max_hours: float | None = None
    max_mbps: float | None = None  # Mbit/s, up and down each, of the model and gradients
    max_gb: float | None = None  # up and down together, of the model and gradients
    download_bytes: float | None = None  # of the model and its statistics, once
    step_bytes: float | None = None  # of one global step, up and down together
    checked_by: str = ""  # who sees the login besides the Hub, say the authority's host name
    data: str = ""  # where the training data come from, a sentence or two
    run: str = ""  # as the person gave it: a name, a path, a link or org/name
    platform: Platform = field(default_factory=detect_platform)

    @property
    def title(self) -> str:
        return f"Lend this machine to “{plain(self.run_id, 60)}”"

    def points(self) -> list[tuple[str, str]]:
        """(heading, text) in the order to read."""
        return [
            ("What runs", self._runs()),
            *([("Where the data come from", plain(self.data, 600))] if self.data else []),
            ("What leaves this machine", self._leaves()),
            ("What it costs", self._costs()),
            ("Limits", self._limits()),
            ("Pause and leave", "At any time, by button, the stop button or Ctrl-C; what you gave stays counted."),
            (self.platform.title, self.platform.words),
        ]

    def _runs(self) -> str:
        about = plain(self.description).rstrip(".")
        return (f"{about}. " if about else "") + (
            "A program on this machine trains a part of the model, together with other volunteers. "
            "It writes to its own cache folder only."
        )

    def _leaves(self) -> str:
        seen = f" Your login goes to the Hub and to {plain(self.checked_by, 100)}." if self.checked_by else ""
        return (
            "Other peers see gradients and your IP address. They and the run's public page see your username, the name "
            f"of your GPU or CPU, its speed, loss and samples. Never files.{seen}"
        )

    def _costs(self) -> str:
        parts = []
        if self.download_bytes is not None:
            parts.append(f"{size(self.download_bytes)} to download at first")
        if self.step_bytes is not None:
            parts.append(f"about {size(self.step_bytes)} with each step of the swarm, up and down")
        parts.append("the power of a full load")
        line = ", ".join(parts)
        return f"{line[0].upper()}{line[1:]}; the machine may get warm and its fans loud."

    def _limits(self) -> str:
        caps = []
        if self.max_hours is not None:
            caps.append(f"{duration(3600 * self.max_hours)} at most")
        if self.max_mbps is not None:
            caps.append(f"{number(self.max_mbps)} Mbit/s at most")
        if self.max_gb is not None:
            caps.append(f"{size(1e9 * self.max_gb)} at most")
        if not caps:
            return "None set; give max_hours, max_mbps or max_gb if you want some."
        is_of_line = self.max_mbps is not None or self.max_gb is not None
        counted = " Of the line, model and gradients count; reading the data and small talk come on top."
        return f"{', '.join(caps)}.{counted * is_of_line}"
