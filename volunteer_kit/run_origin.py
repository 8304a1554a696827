"""Where a run file came from, which decides what it may name on this machine."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from volunteer_kit.data.addresses import ANY_ADDRESS, AddressPolicy


class Origin(BaseModel):
    """Of a run, on one machine; it is no part of the run, and never sent to others.

    :ivar kind: "kit": it comes with the package; "file": a file of this machine's user; "python": a dictionary;
        "link": a file behind an address; "hub": a repository of the Hugging Face Hub
    :ivar endpoint: of a link whose server is in this machine's own network: its IP address and port
    :ivar allow_private_data: the user allows data from this machine's own network
    :ivar own_data: the user named the shards
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["kit", "file", "python", "link", "hub"] = "python"
    endpoint: tuple[str, int] | None = None
    allow_private_data: bool = False
    own_data: bool = False

    @property
    def is_foreign(self) -> bool:
        """Whether somebody else wrote the file, and this machine's user has not looked at it."""
        return self.kind in ("link", "hub")

    @property
    def addresses(self) -> AddressPolicy:
        """Which servers the run's data may be read from."""
        if not self.is_foreign or self.own_data:
            return ANY_ADDRESS
        if self.allow_private_data:
            return AddressPolicy("any", is_foreign=True)
        return AddressPolicy("public", self.endpoint, is_foreign=True)
