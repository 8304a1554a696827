"""Two people fine-tune together, each by a script as one writes it: every form of hivemind_config, in two processes."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from hivemind.p2p import PeerID

from tests.fine_tunes import Pair, edited, on_loopback
from tests.free_ports import free_port
from tests.local_swarm import ROOT
from volunteer_kit.swarm.net.identity import ensure_identity
from volunteer_kit.training.hf_member import Member

PARTS = ROOT / "benchmarks/trainer_parts"
EXAMPLE = (PARTS / "together.py").read_text()
HEADING = "Fine-tuning with transformers"  # of the README's section


def example_of(text: str) -> str:
    """The first block of Python under HEADING."""
    _, section = re.split(rf"^#+ {HEADING}$", text, flags=re.M)
    return re.search(r"^```python\n(.*?)^```$", section, re.M | re.S).group(1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    pair = Pair(tmp_path_factory.mktemp("pair"))
    yield pair
    try:
        pair.leave()
    finally:
        pair.close()


def test_the_one_who_begins_names_nobody_and_the_other_takes_the_printed_line(pair):
    one, other = pair.train(EXAMPLE)
    assert one.logged("step")[-1] == other.logged("step")[-1] == 20
    assert 0 < one.logged("loss")[-1] < one.logged("loss")[0]


def test_the_example_of_the_readme_trains_with_another(pair):
    example = example_of((ROOT / "README.md").read_text())
    pair.train(re.sub(r"max_steps=\d+", "max_steps=5", example), given=True)


def test_the_second_joins_over_udp_alone(pair, tmp_path):
    """The older form of quic is read; the identity is the one of the file."""
    identity = tmp_path / "me.key"
    ensure_identity(str(identity))
    both = {"host_maddrs": ["/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic"]}
    one, other = pair.train(
        EXAMPLE, {**both, "identity_path": str(identity)}, both, choose=lambda maddrs: on_loopback(maddrs, "udp")
    )
    assert "/udp/0/quic is read as /ip4/0.0.0.0/udp/0/quic-v1" in one.said
    assert one.wait_event("met")["peer_id"] == str(PeerID.from_identity(identity.read_bytes()))
    for person in (one, other):
        (address,) = person.wait_event("met")["addresses"]  # of all connections of its p2pd
        assert re.fullmatch(r"/ip4/127\.0\.0\.1/udp/\d+/quic-v1", address)


@pytest.mark.slow
def test_a_fixed_port_stands_in_the_printed_line(pair):
    port = free_port()
    verbose = EXAMPLE.replace('"target_batch_size": 32', '"target_batch_size": 32, "verbose": True')
    one, _ = pair.train(verbose, {"host_maddrs": [f"/ip4/0.0.0.0/tcp/{port}"]})
    assert all(f"/tcp/{port}/p2p/" in maddr for maddr in one.invitation())


def test_the_address_of_a_router_is_printed_while_this_machine_listens(pair):
    port = free_port()
    one, _ = pair.train(
        EXAMPLE,
        {"host_maddrs": [f"/ip4/203.0.113.5/tcp/{port}"]},
        choose=lambda maddrs: [maddr.replace("203.0.113.5", "127.0.0.1") for maddr in maddrs],
    )
    assert "203.0.113.5 is not an address of this machine: it is announced" in one.said
    peer_id = one.wait_event("met")["peer_id"]
    assert one.invitation() == [f"/ip4/203.0.113.5/tcp/{port}/p2p/{peer_id}"]


MODEL = """
import torch
class Head(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.norm = inner, torch.nn.BatchNorm1d(32)
        self.spare, self.rare = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
        self.uses_rare = False
    def forward(self, x):
        logits = self.inner(self.norm(x.transpose(1, 2)).transpose(1, 2))
        return logits * self.rare.mean() if self.uses_rare else logits
model = tiny_llama()
model.lm_head = Head(model.lm_head)
"""
LAST = "trainer.train()"


def test_buffers_are_averaged_and_a_parameter_that_no_member_used_is_left_alone(pair):
    """In 8 bits, too. One of the two uses a parameter that the other does not; of another nobody has a gradient."""
    before, _, after = EXAMPLE.partition("model = get_peft_model")
    script = before + MODEL + after[after.index("\n") :]
    for old, new in (
        ("max_steps=20", "max_steps=6, weight_decay=0.1"),
        ('"target_batch_size": 32', '"target_batch_size": 32, "grad_compression": "uniform8"'),
        (LAST, f'model.lm_head.uses_rare = bool(trainer.args.hivemind_config["dht"])\n{LAST}'),
    ):
        assert old in script
        script = script.replace(old, new)
    one, _ = pair.train(script)
    trained = {name.removeprefix("lm_head."): tensor for name, tensor in one.trained.items()}
    assert torch.equal(trained["spare"], torch.ones(5))
    assert not torch.equal(trained["rare"], torch.ones(5))
    assert trained["norm.running_var"].min() > 0 and trained["norm.running_mean"].abs().max() > 0
    assert trained["norm.num_batches_tracked"] > 0


@pytest.mark.parametrize("name", ["qlora", pytest.param("sft", marks=pytest.mark.slow)])
def test_adapters_learn_together_and_are_equal_at_the_end(pair, name):
    """Over a base of 4 bits with paged 8-bit AdamW; by TRL's trainer with the callback."""
    if name == "qlora":
        pytest.importorskip("bitsandbytes")
    people = pair.train((PARTS / f"{name}.py").read_text())
    for person in people:
        losses = person.logged("loss")
        assert losses[-1] < losses[0] - 0.5
        assert person.trained and all("lora_" in parameter for parameter in person.trained)


def test_other_settings_under_the_same_run_id_are_told_and_not_averaged(pair):
    one, other = pair.idle()
    one.begin(edited(EXAMPLE.replace("max_steps=20", "max_steps=2000"), {}))
    one.wait_event("met")
    invited = {"initial_peers": on_loopback(one.invitation())}
    other.begin(edited(EXAMPLE.replace("max_steps=20", "max_steps=3000"), invited))
    with pytest.raises(AssertionError, match="'ours' with another model or other settings"):
        other.wait_event("met")


GENERATING = """
import trl
from benchmarks.trainer_matrix_parts import material
config = {"dht": {}, "opt": {"run_id": "ours", "target_batch_size": 16, "matchmaking_time": 3.0}}
tokens = material.tokenizer()
tokens.padding_side = "left"
trainer = trl.GRPOTrainer(
    model=material.stored(), train_dataset=material.prompts(range(33)), processing_class=tokens,
    reward_funcs=lambda completions, **_: [float(len(set(one.split()))) for one in completions],
    args=trl.GRPOConfig(
        "out", per_device_train_batch_size=2 if "initial_peers" in config["dht"] else 4, num_generations=2,
        max_completion_length=4, num_train_epochs=1, learning_rate=1e-3, logging_steps=1, save_strategy="no",
        report_to=[], use_cpu=True, bf16=False, disable_tqdm=True,
    ),
)
from volunteer_kit import SwarmCallback
trainer.add_callback(SwarmCallback(trainer, config))
trainer.train()
"""


def test_peers_of_other_batches_that_generate_average_with_each_other(pair):
    """With 33 prompts a batch of 4 completions leaves one out, one of 2 none: a pass was 4 steps for one of them and 5
    for the other, so that their schedules and their fingerprints differed."""
    pytest.importorskip("trl")
    one, other = pair.train(GENERATING)
    assert one.logged("step")[-1] == other.logged("step")[-1] == 4


def test_who_came_at_the_same_moment_with_other_settings_is_told_once(capsys):
    """Neither was on the board when the other looked."""
    member = object.__new__(Member)
    member.config, member.fingerprint = SimpleNamespace(run_id="ours"), "a" * 32
    member.loss, member._told_of_mismatch = 2.0, False
    other = SimpleNamespace(fingerprint="b" * 32, loss=1.0, kit="")
    member._look_at([other])
    member._look_at([other])
    assert capsys.readouterr().out.count("with another model or other settings (theirs bbbbbbbb, yours aaaaaaaa)") == 1
    assert member.swarm_loss == 2.0, "that of another model says nothing"
    member._look_at([other, SimpleNamespace(fingerprint="a" * 32, loss=1.0, kit="")])
    assert capsys.readouterr().out == "" and member.swarm_loss == 1.5
