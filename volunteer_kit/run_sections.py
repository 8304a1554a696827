"""Two sections of a run file: how its swarm averages, and who may let peers in."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from volunteer_kit.auth.keys import parse_public_keys
from volunteer_kit.data.addresses import AddressRefused, web_link
from volunteer_kit.run_reader import impossible

HubName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,95}$")]  # of an account or organization
Codec = Literal["none", "float16", "uniform8", "blockwise8"]  # swarm/codecs/registry.py has them
LossyCodec = Literal["uniform4", "blockwise4", "sparse"]  # what these leave out comes with later rounds


class LocalStepsSection(BaseModel):
    """Fewer rounds: each peer steps by itself with the run's `optimizer`, and in a round the way that each has gone is
    averaged, for an outer optimizer (DiLoCo). An epoch is still target_batch_size samples of all peers together."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    # Samples of one step of one peer. A peer takes target_batch_size / (peers * batch_size) steps in an epoch.
    batch_size: int = Field(ge=1, le=2**20)
    # Share of the mean change that the model takes, with `outer_momentum` of earlier changes on top. Lower it if the
    # loss jumps up after rounds. With `sparse`, whose late values are a momentum of their own, 1 and 0 learnt best.
    outer_lr: float = Field(0.7, gt=0, le=10)
    # Momentum of the outer optimizer (Nesterov).
    outer_momentum: float = Field(0.9, ge=0, lt=1)


class SwarmConfig(BaseModel):
    """How the swarm averages. Times are in seconds, sizes in elements of a tensor."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    # Has no use any more; accepted.
    matchmaking_time: float = Field(15.0, gt=0, le=600)
    # Seconds that the exchange of a round may take, at most. Raise it when peers with slow uplinks report
    # "received < 100 %".
    allreduce_timeout: float = Field(60.0, gt=0, le=3600)
    # Has no use any more; accepted.
    averaging_timeout: float = Field(180.0, gt=0, le=7200)
    # Has no use any more; accepted.
    progress_expiration: float = Field(60.0, gt=1, le=3600)
    # Seconds that a newcomer waits for the state of others. Raise it for large models on slow links.
    load_state_timeout: float = Field(600.0, gt=0, le=7200)
    # Has no use any more: 0 is accepted, for models are equal, and nobody averages them.
    average_state_every: int = Field(0, ge=0, le=1000)
    # The rule by which the members' gradients become one. centered_clip: a member that sends something else than the
    # others moves the result by a bounded distance. mean: every value counts as it is, for runs among friends. The
    # others are for comparison.
    aggregation: Literal["mean", "centered_clip", "median", "trimmed_mean", "krum"] = "mean"
    # Compute while a round runs: in a fine-tune, if one of these is true. A text-to-image run always does.
    delay_optimizer_step: bool = True
    delay_grad_averaging: bool = False  # needs delay_optimizer_step
    # Codec of gradients with more than `compress_above` elements; docs/home-links.md compares them. powersgd sends
    # matrices of rank `grad_rank` in their place, in `small_compression`; one of the two in each round.
    grad_compression: Literal[Codec, LossyCodec, "powersgd"] = "blockwise8"
    # Has no use any more; accepted: parameters and statistics travel as they are.
    state_compression: Codec = "uniform8"
    # Codec of tensors with `compress_above` elements or fewer.
    small_compression: Literal[Codec, LossyCodec] = "float16"
    # Share of a tensor's values that `sparse` sends, the largest ones; the rest is added to the next rounds. Lower it
    # for slower lines: it takes 1 / density rounds until all of a gradient has come. That acts as a momentum: with the
    # first of the optimizer's betas at 0.5, and twice the lr, the loss was that of dense gradients.
    grad_density: float = Field(1 / 80, gt=0, le=1)
    # Rank of the matrices that `powersgd` sends. 1 to 4 are common; a higher rank is more exact and more to send.
    grad_rank: int = Field(4, ge=1, le=1024)
    # Epochs that a gradient may be late and still count. A late one goes into a later step, with less weight. Raise
    # it for peers that need several epochs for one microbatch.
    max_staleness: int = Field(4, ge=1, le=16)
    # Steps of each peer between two rounds. Without this section each epoch is one step, with the gradients of all.
    local_steps: LocalStepsSection | None = None
    compress_above: int = Field(2**16, ge=0)  # elements above which a tensor is large; as in the original run

    @model_validator(mode="before")
    @classmethod
    def _of_older_files(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "commits" not in values:
            return values
        if values["commits"] is not True:
            raise impossible("", "peers always vote on each step, and commits says otherwise", "leave commits out")
        return {name: value for name, value in values.items() if name != "commits"}

    @model_validator(mode="after")
    def _possible(self) -> SwarmConfig:
        sparse = [name for name in ("grad_compression", "small_compression") if getattr(self, name) == "sparse"]
        if sparse and self.aggregation != "mean":
            raise impossible(
                "aggregation",
                f"{sparse[0]}: sparse does not go with {self.aggregation}: most values of a part are zero, and so "
                "would its median be",
                f"set aggregation: mean, for a run among friends, or {sparse[0]}: blockwise4",
            )
        if self.grad_compression == "powersgd" and self.aggregation != "mean":
            raise impossible(
                "aggregation",
                f"grad_compression: powersgd does not go with {self.aggregation}: its factors are averaged, and a "
                "factor of which values were left out is no gradient's",
                "set aggregation: mean, for a run among friends, or grad_compression: blockwise4",
            )
        if self.grad_compression == "powersgd" and self.small_compression not in ("none", "float16"):
            raise impossible(
                "small_compression",
                "the factors of powersgd travel by it, and have to be exact",
                "set small_compression: float16",
            )
        if self.delay_grad_averaging and not self.delay_optimizer_step:
            raise impossible(
                "delay_grad_averaging",
                "gradients averaged in the background are ready only after the step that needs them, "
                "so delay_grad_averaging works with delay_optimizer_step only",
                "set delay_optimizer_step: true, or delay_grad_averaging: false",
            )
        if self.average_state_every > 0:
            raise impossible(
                "average_state_every", "models are equal, and nobody averages them", "set average_state_every: 0"
            )
        return self


class VerificationConfig(BaseModel):
    """Whether members compute each other's samples again, and when who cheats is banned. See robust/standing.py."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    # Chance that a member's contribution to a round is computed again; everybody's work grows by that share. Raise it
    # in a run of fewer than ten volunteers.
    share: float = Field(1 / 16, gt=0, le=1)
    # Difference that is allowed for precision and codec, as a share of a contribution's length. Raise it if honest
    # members get mismatches just above it.
    tolerance: float = Field(0.2, gt=0, lt=1)
    # Confirmed mismatches within `window` epochs that lead to a ban.
    strikes: int = Field(3, ge=1, le=100)
    # Epochs after which a strike is forgotten.
    window: int = Field(1000, ge=1, le=10**6)
    # Microbatches of a newcomer that have to be found right before its contributions count; they are credited then. 0:
    # they count at once.
    probation: int = Field(8, ge=0, le=10**4)


class AuthorityConfig(BaseModel):
    """Who may let peers in: the server that signs access tokens, and the key that proves its signature.

    Let in are members of `organization`, `users`, and whom moderators add; with `open` everybody who has an account of
    the Hub and is not banned.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(max_length=500, pattern=r"^https?://")  # address of the authority; the host fills it in
    # The run's root key; two keys while it is being replaced. The host fills it in.
    public_key: str = Field(max_length=400)
    organization: HubName | None = None  # an organization on the Hub whose members may join
    users: tuple[HubName, ...] = Field((), max_length=10_000)  # accounts of the Hub that may join as well
    open: bool = False  # everybody who has an account of the Hub, and is not banned, may join
    moderators: tuple[HubName, ...] = Field((), max_length=100)  # accounts that add, remove and ban
    oauth_client_id: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_.-]{1,100}$",
        description=(
            "The client id of an OAuth app of the host's own (huggingface.co/settings/applications/new; scopes openid "
            "and profile, nothing more; device code allowed). With it volunteers can log in with their browser. "
            "Without it they need a token: the Hub's general app asks for all rights, which no authority should get."
        ),
    )

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        try:
            host = urlsplit(web_link(url)).hostname or ""
        except AddressRefused as why:
            raise impossible("", f"it is no address: {why}", "write it as https://NAME") from None
        if "?" in url or "#" in url:
            raise impossible("", "a ? or # follows the address", "write it as https://NAME")
        if url.startswith("http://") and not is_this_machine(host):
            what = f"logins would be sent to {host} unencrypted"
            raise impossible("", what, "write it as https://NAME; the notebook host_a_run shows how to get there")
        return url

    @field_validator("public_key")
    @classmethod
    def _is_key(cls, text: str) -> str:
        try:
            parse_public_keys(text)
        except ValueError as error:
            fix = "`volunteer-kit host` fills it in; on a machine of its own, `volunteer-kit authority` prints it"
            raise impossible("", str(error), fix) from None
        return text


def is_this_machine(host: str) -> bool:
    """Is it a name of the loopback?"""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
