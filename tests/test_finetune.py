"""Fine-tunes from a run file: the file, the model that it means, and a run with authority and monitor."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.local_authority import add_person
from tests.local_swarm import LocalPeer
from tests.monitored import SMALLER, monitored
from volunteer_kit.checkpoint import load_checkpoint
from volunteer_kit.dashboard.page import render
from volunteer_kit.dashboard.state import empty_state, run_info
from volunteer_kit.fetch import fetch_checkpoint
from volunteer_kit.finetune import TrainingArguments, _of_run, swarm_trainer
from volunteer_kit.host.folder import HostFolder
from volunteer_kit.host.settings import HostSettings
from volunteer_kit.host.words import welcome
from volunteer_kit.model.transformers_model import (
    LoraSettings,
    TransformersConfig,
    build_transformers,
    compute_dtype_of_4bit,
    save_pretrained,
    shapes_of,
)
from volunteer_kit.monitor.card import model_card
from volunteer_kit.run_sections import AuthorityConfig
from volunteer_kit.run_sizes import parameters_of
from volunteer_kit.runs import (
    FineTuneConfig,
    RunConfig,
    RunError,
    build_model,
    build_param_groups,
    load_run,
    require_ready,
    with_data,
)
from volunteer_kit.swarm.node.beside import judge_trained
from volunteer_kit.swarm.records.device_speeds import Limits
from volunteer_kit.swarm.rounds.beside import BUFFERS, buffer_shapes, put_buffers
from volunteer_kit.ways_in import Offer

TINY = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
MODEL = {"config": TINY, "lora": {"r": 4}, "max_length": 48}
RUN = {
    "run_id": "ours", "model": MODEL, "target_batch_size": 64,
    "optimizer": {"lr": 0.02, "warmup_epochs": 2, "total_epochs": 60},
}  # fmt: skip


def trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


# --- the model ---


def test_adapters_beside_a_base_of_shapes_are_those_beside_a_real_one():
    """The monitor holds no base, and all begin alike."""
    config = TransformersConfig.model_validate(MODEL)
    real, shapes = trained(build_transformers(config, 3)), trained(build_transformers(config, 3, weights=False))
    assert list(real) == list(shapes) and all(torch.equal(real[name], shapes[name]) for name in real)
    assert any(tensor.abs().sum() > 0 for tensor in real.values())
    other = trained(build_transformers(config, 4))
    assert not all(torch.equal(real[name], other[name]) for name in real), "the seed is the run's"
    base = [p for p in build_transformers(config, 3, weights=False).parameters() if not p.requires_grad]
    assert base and all(p.is_meta for p in base)


def test_a_quantized_base_begins_with_the_same_adapters(tmp_path):
    pytest.importorskip("bitsandbytes")
    build_transformers(TransformersConfig(config=TINY), 0).save_pretrained(tmp_path / "base")
    config = TransformersConfig(transformers=str(tmp_path / "base"), lora=LoraSettings(r=4))
    quantized = build_transformers(config, 3, quantization="4bit")
    assert any(type(p).__name__ == "Params4bit" for p in quantized.parameters())
    ours, theirs = trained(quantized), trained(build_transformers(config, 3, weights=False))
    assert list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)
    with pytest.raises(ValueError, match="quantized model cannot be trained"):
        build_transformers(TransformersConfig(config=TINY), 0, quantization="4bit")


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [(None, torch.float32), ((6, 0), torch.float16), ((7, 5), torch.float16), ((8, 0), torch.bfloat16)],
    ids=["CPU", "P100", "T4", "A100"],
)
def test_a_4bit_base_computes_in_what_the_card_has(monkeypatch, capability, dtype):
    """PyTorch says that a T4 supports bf16, unless it is asked to leave emulation out."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or capability >= (8, 0)
    )
    assert compute_dtype_of_4bit() == dtype


@pytest.mark.parametrize("lora", [LoraSettings(r=4), None])
def test_what_is_saved_is_loaded_by_those_who_use_it(tmp_path, lora):
    config = TransformersConfig(config=TINY, lora=lora)
    model = build_transformers(config, 3)
    with torch.no_grad():
        for tensor in trained(model).values():
            tensor.add_(0.1)
    files = save_pretrained(config, trained(model), tmp_path / "saved")
    words = torch.arange(12)[None]
    if lora is None:
        from transformers import AutoModelForCausalLM

        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    else:
        from peft import PeftModel

        assert set(files) == {"adapter_config.json", "adapter_model.safetensors"}
        base = build_transformers(TransformersConfig(config=TINY), 3)
        again = PeftModel.from_pretrained(base, tmp_path / "saved")
    torch.testing.assert_close(again(words).logits, model.eval()(words).logits)


# --- the file ---


def test_a_run_file_of_a_fine_tune(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN))
    run = load_run(path)
    assert isinstance(run, FineTuneConfig) and not run.draws and run.model.lora.r == 4 and run.data is None
    again = load_run(run.model_dump(mode="json"))
    assert again == run and again.fingerprint == run.fingerprint
    adapters = sum(p.numel() for p in trained(build_model(run)).values())
    assert parameters_of(run) == adapters < sum(p.numel() for p in shapes_of(run.model).parameters())


def test_a_newcomer_believes_what_steps_can_have_moved():
    """Among strangers; and what goes round beside the gradients is no matter of steps."""
    run = load_run({**RUN, "swarm": {"aggregation": "median", "max_staleness": 7}})
    config = _of_run(run, {}, "identity.key", None, None)
    assert config.max_staleness == 7 and config.codec == ("float16", "blockwise8", 2**16, 1 / 80)
    admission = SimpleNamespace(is_open=False, trust=None, username_of=lambda peer: "Ada", account_of=lambda peer: None)
    config.door.peer = SimpleNamespace(admission=admission, peer_id=None)
    terms = config.door.node_terms(SimpleNamespace(fetch=dict))
    assert terms.account == "ada" and terms.rule == "median" and terms.believe() == Limits()
    parameters = [p.detach() for group in build_param_groups(run, build_model(run)) for p in group["params"]]
    beside = torch.zeros(len(parameters), 3)
    judge = judge_trained(terms.judge, len(parameters))
    moved = [p + 1e-3 for p in parameters]
    assert judge([*parameters, beside], 0, [*moved, beside + 1e9], 3) is None
    assert judge([*parameters, beside], 0, [*(p + 10.0 for p in parameters), beside], 3)
    config.door.peer.admission = SimpleNamespace(**{**vars(admission), "is_open": True})
    open_terms = config.door.node_terms(SimpleNamespace(fetch=dict))
    assert open_terms.judge is None and open_terms.believe is None


def test_local_steps_are_not_for_trainers():
    """A Trainer would step with the outer optimizer, at its rate of 0.7, on plain gradients."""
    with pytest.raises(RunError, match="leave swarm: local_steps out"):
        load_run({**RUN, "swarm": {"local_steps": {"batch_size": 8}}})


@pytest.mark.parametrize(
    ("change", "is_another"),
    [
        ({"model": {**MODEL, "lora": {"r": 8}}}, True),
        ({"model": {**MODEL, "max_length": 32}}, True),
        ({"seed": 1}, True),
        ({"target_batch_size": 32}, True),
        ({"swarm": {"grad_compression": "none"}}, True),
        ({"description": "words"}, False),
        ({"initial_peers": ["/ip4/1.2.3.4/tcp/1/p2p/QmA"]}, False),
    ],
)
def test_what_must_be_equal_is_in_the_fingerprint(change, is_another):
    assert (load_run({**RUN, **change}).fingerprint != load_run(RUN).fingerprint) is is_another


def test_kits_whose_rounds_have_other_shapes_do_not_meet(monkeypatch):
    """Older ones tell nobody which parameters they used."""
    now, pictures = load_run(RUN).fingerprint, load_run("demo").fingerprint
    assert load_run(RUN).marks_unused and not load_run("demo").marks_unused
    monkeypatch.setattr(RunConfig, "marks_unused", False)
    assert load_run(RUN).fingerprint != now and load_run("demo").fingerprint == pictures


def test_a_model_of_ones_own_with_other_buffers_is_not_the_runs(tmp_path):
    run = load_run(RUN)
    model = build_transformers(run.model, run.seed)
    model.register_buffer("level", torch.ones(2))
    with pytest.raises(RunError, match="it differs in 'level'"):
        swarm_trainer(run, train_dataset=[], model=model, args=TrainingArguments(str(tmp_path), use_cpu=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {**MODEL, "transformers": "org/name"}}, ["either transformers", "or config"]),
        ({"model": {**MODEL, "loras": {}}}, ["'loras'", "'lora'"]),
        ({"model": {**MODEL, "lora": {"rank": 8}}}, ["'rank'", "alpha"]),
        ({"model": {**MODEL, "max_length": 0}}, ["max_length"]),
        ({"captions": ["a red circle"]}, ["captions"]),
        ({"image_tokenizer": "scenes32"}, ["image_tokenizer"]),
        ({"data": {"kind": "scenes"}}, ["data"]),
    ],
)
def test_mistakes_are_told(change, words):
    with pytest.raises(RunError) as caught:
        load_run({**RUN, **change})
    assert all(word in str(caught.value) for word in words), caught.value


def test_what_is_made_for_pictures_says_where_the_door_is(tmp_path):
    run = load_run(RUN)
    for refused in (lambda: require_ready(run), lambda: with_data(run, "shards.tar")):
        with pytest.raises(RunError, match="swarm_trainer"):
            refused()


def test_the_host_and_the_page_know_what_it_is(tmp_path):
    run = load_run(RUN)
    state = empty_state(run_info(run))
    assert "Pictures" not in render(state) and "Pictures" in render(empty_state(run_info(load_run("demo"))))
    url, folder = "https://a.example", HostFolder(tmp_path)
    authority = AuthorityConfig.model_construct(open=True)
    said = "\n".join(welcome("ours", Offer(url, draws=run.draws), HostSettings(), folder, [], [], authority))
    assert f'swarm_trainer("{url}"' in said and "join" not in said.partition("The authority admits")[0]


@pytest.mark.parametrize("lora", [{"r": 4}, None])
@pytest.mark.parametrize("base", [{"config": TINY}, {"transformers": "org/base@abc"}])
def test_the_card_says_how_to_use_it(lora, base, monkeypatch):
    monkeypatch.setattr("volunteer_kit.monitor.card.parameters_of", lambda run: 1234)
    run = load_run({**RUN, "model": {**base, "lora": lora}})
    card = model_card(run, "org/ours", 10, [], [])
    assert "text-to-image" not in card and "pictures" not in card and "1,234" in card
    assert ("from peft import" in card) is (lora is not None)
    assert ("base_model: org/base" in card) is ("transformers" in base)


# --- the run ---

@pytest.mark.slow
def test_two_members_an_authority_and_a_monitor(tmp_path):
    """Let in by their login, averaged together, credited, kept and signed by the monitor; who may not come
    in is told."""
    no_pictures = dict.fromkeys(("image_tokenizer", "text_tokenizer", "data", "captions"))
    about = {**RUN, **no_pictures, "run_id": "demo", "target_batch_size": 256, "swarm": SMALLER["swarm"]}
    about["optimizer"] = {"lr": 0.05, "warmup_epochs": 2, "total_epochs": 400}
    with monitored(tmp_path, **about) as run:
        monitor = run.monitor("--checkpoint-every", "4")

        def member(name: str, token: str | None = None) -> LocalPeer:
            peer = LocalPeer(
                tmp_path / f"{name}.log", module="tests.finetune_peer", name=name, run=str(run.file),
                first=1000 * len(run.peers), out=str(tmp_path / name), max_steps=25, initial_peers=run.maddrs,
                hf_token=token or add_person(run.hub, name),
            )  # fmt: skip
            run.peers.append(peer)
            return peer

        ada, bob = member("ada"), member("bob")
        mallory = member("mallory", token="hf_nobodys")
        assert "mallory" in mallory.wait_event("refused")["why"] or "token" in mallory.wait_event("refused")["why"]
        for peer in (ada, bob):
            peer.wait_for(lambda e: e["event"] == "step" and e["group_size"] >= 2 and e["samples"] > 0)
        least = 3 * 256  # of three epochs

        def both_are_credited(journal) -> bool:
            samples = {row["username"]: row["samples"] for row in journal.leaderboard()}
            return samples.keys() == {"ada", "bob"} and sum(samples.values()) > least

        monitor.wait(both_are_credited)
        logs = [peer.wait_event("done")["log"] for peer in (ada, bob)]
        for log in logs:
            losses = [row["loss"] for row in log if "loss" in row]
            assert losses[-1] < losses[0] - 0.1, losses
        ours, theirs = (load_file(tmp_path / name / "trained.safetensors") for name in ("ada", "bob"))
        assert max((ours[name] - theirs[name]).abs().max().item() for name in ours) < 1e-6
        monitor.wait_event("checkpoint")
        assert json.loads((tmp_path / "monitor" / "metrics.jsonl").read_text().splitlines()[-1])["epoch"] > 0


def names_of(run: FineTuneConfig) -> list[str]:
    model = build_model(run)
    return [*(name for name, _ in model.named_parameters()), *([BUFFERS] if buffer_shapes(model) else [])]


UNUSED = {  # its cross-attention has nothing to attend to
    "model_type": "gpt2", "vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2,
    "add_cross_attention": True,
}  # fmt: skip
BIASED = {
    "model_type": "deepseek_v3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
    "moe_intermediate_size": 16, "num_hidden_layers": 2, "first_k_dense_replace": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "max_position_embeddings": 64,
}  # fmt: skip
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("config", "swarm"),
    [(UNUSED, {"grad_compression": "powersgd", "grad_rank": 2}), (BIASED, {"aggregation": "centered_clip"})],
    ids=["unused parameters", "buffers"],
)
def test_members_of_a_run_leave_alone_what_none_used_and_average_buffers(tmp_path, config, swarm):
    """The monitor goes into the same rounds, has the same state, and keeps it."""
    no_pictures = dict.fromkeys(("image_tokenizer", "text_tokenizer", "data", "captions"))
    about = {**no_pictures, "run_id": "demo", "target_batch_size": 64, "model": {"config": config, "max_length": 48}}
    about["optimizer"] = {"lr": 0.02, "warmup_epochs": 2, "total_epochs": 400, "weight_decay": 0.1}
    is_open = config is UNUSED
    with monitored(tmp_path, open_run=is_open, **about, swarm={**SMALLER["swarm"], **swarm}) as run:
        monitor = run.monitor("--checkpoint-every", "1")
        peers = [
            LocalPeer(
                tmp_path / f"{name}.log", module="tests.finetune_peer", name=name, run=str(run.file),
                first=1000 * number, out=str(tmp_path / name), max_steps=12, initial_peers=run.maddrs,
                wait_for=2, moves={BIAS: 1.0 + number} if config is BIASED else {},
                hf_token=None if is_open else add_person(run.hub, name),
            )
            for number, name in enumerate(("ada", "bob"))
        ]  # fmt: skip
        run.peers.extend(peers)
        for peer in peers:
            peer.wait_for(lambda e: e["event"] == "step" and e["group_size"] == 3 and e["cause"] is None)
        for peer in peers:
            peer.wait_event("done")
        monitor.wait(lambda journal: journal.latest()["epoch"] >= 11)
        made = load_run(run.file)
        if is_open:
            fetched = fetch_checkpoint(made, initial_peers=run.maddrs, out=tmp_path / "fetched")
            assert load_checkpoint(fetched, fingerprint=made.fingerprint).model.keys() == {*names_of(made)}
    initial = build_model(made)
    ours, theirs = (load_file(tmp_path / name / "trained.safetensors") for name in ("ada", "bob"))
    [*_, last] = sorted((tmp_path / "monitor" / "checkpoints").iterdir())
    kept = load_checkpoint(last, fingerprint=made.fingerprint)
    assert kept.model.keys() == {*names_of(made)}
    for name, began in initial.named_parameters():
        is_unused = "crossattention" in name or "ln_cross_attn" in name
        assert torch.equal(ours[name], began) is is_unused and torch.equal(theirs[name], began) is is_unused, name
        assert torch.equal(kept.model[name], began) is is_unused, name
    if config is BIASED:
        assert (ours[BIAS] - theirs[BIAS]).abs().max() < 4.0, "each moved by more than 12 and 24"
        assert kept.model[BUFFERS].min() > 6.0 and initial.get_buffer(BIAS).abs().max() == 0.0
        saved = save_pretrained(made.model, kept.model, tmp_path / "saved", partial(put_buffers, kept.model))
        assert torch.equal(load_file(saved["model.safetensors"])[BIAS], kept.model[BUFFERS])
