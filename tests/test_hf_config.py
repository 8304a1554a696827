"""hivemind_config as trahiv takes it: what is read of it, said of it, refused of it."""

from __future__ import annotations

import json

import psutil
import pytest
from hivemind.compression import Uniform8BitQuantization
from hivemind.utils.multiaddr import Multiaddr
from transformers import HfArgumentParser

from volunteer_kit.swarm.codecs.registry import CODECS
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.training.hf_config import read_hivemind_config
from volunteer_kit.training.hf_trainer import SwarmTrainingArguments

OPT = {"run_id": "spanish", "target_batch_size": 512}


def read(dht=None, **opt):
    return read_hivemind_config({"dht": dht or {}, "opt": {**OPT, **opt}})


def test_the_least_that_is_needed():
    for config in ({"opt": OPT}, {"dht": None, "opt": OPT}, {"dht": {}, "opt": {**OPT, "verbose": True}}):
        found = read_hivemind_config(config)
        assert found.run_id == "spanish" and found.options.target_batch_size == 512 and found.words == ()
        assert not found.peer.initial_peers and found.peer.host_maddrs == ["/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"]
        assert not found.options.delay_optimizer_step  # as hivemind's
    assert found.options.verbose and found.wait_for_peers == 1
    assert read(wait_for_peers=2).wait_for_peers == 2


def test_addresses_in_all_forms():
    peers = ["/ip4/203.0.113.5/tcp/31337/p2p/QmA", "/ip4/203.0.113.5/udp/31337/quic/p2p/QmA"]
    found = read({"initial_peers": peers, "host_maddrs": ["/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic"]})
    assert found.peer.initial_peers == [peers[0], peers[1].replace("/quic/", "/quic-v1/")]
    assert found.peer.host_maddrs == ["/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic-v1"]
    assert len(found.words) == 2 and all("quic-v1" in word for word in found.words)
    assert read({"initial_peers": " ".join(peers)}).peer.initial_peers == found.peer.initial_peers
    assert read({"initial_peers": [Multiaddr("/ip4/127.0.0.1/tcp/1")]}).peer.initial_peers


def test_an_address_of_the_router_is_announced_while_all_of_ours_listen():
    found = read({"host_maddrs": ["/ip4/203.0.113.5/tcp/31337", "/ip4/203.0.113.5/udp/31337/quic-v1"]})
    assert found.peer.host_maddrs == ["/ip4/0.0.0.0/tcp/31337", "/ip4/0.0.0.0/udp/31337/quic-v1"]
    assert found.peer.announce_maddrs == ["/ip4/203.0.113.5/tcp/31337", "/ip4/203.0.113.5/udp/31337/quic-v1"]
    assert all("not an address of this machine" in word for word in found.words)
    own = [e.address for entries in psutil.net_if_addrs().values() for e in entries if e.family.name == "AF_INET"]
    for address in [*own, "127.0.0.1", "0.0.0.0"]:
        found = read({"host_maddrs": [f"/ip4/{address}/tcp/0"]})
        assert found.peer.host_maddrs == [f"/ip4/{address}/tcp/0"] and not found.peer.announce_maddrs


def test_arguments_of_hivemind_go_on_to_where_they_belong():
    found = read(
        {"identity_path": "me.key", "startup_timeout": 30, "use_relay": False, "start": True},
        client_mode=True, matchmaking_time=5.0, averaging_timeout=60.0, delay_grad_averaging=True,
        state_averaging_compression="float16", grad_compression=Uniform8BitQuantization(),
    )  # fmt: skip
    peer, options = found.peer, found.options
    assert (peer.identity_path, peer.startup_timeout, peer.client_mode) == ("me.key", 30, True)
    assert peer.dht_options == {"use_relay": False}
    assert options.allreduce_timeout == 55.0
    assert options.delay_grad_averaging and options.delay_optimizer_step
    assert options.grad_codec is CODECS["uniform8"]
    assert len(found.words) == 1 and "has no use" in found.words[0]  # of hivemind's rounds


def test_what_has_no_use_is_said():
    found = read(batch_size_per_step=4, shutdown_timeout=3, offload_optimizer=False, reuse_grad_buffers=False)
    assert len(found.words) == 3 and not any("reuse_grad_buffers" in word for word in found.words)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ([], ["dictionary"]),
        ({"opts": OPT}, ["no 'opts'", "'opt'"]),
        ({"opt": [1]}, ['"opt"', "dictionary"]),
        ({"opt": {"target_batch_size": 4}}, ['"run_id"']),
        ({"opt": {"run_id": " ", "target_batch_size": 4}}, ['"run_id"']),
        ({"opt": {"run_id": "a"}}, ['"target_batch_size"', "None"]),
        ({"opt": {"run_id": "a", "target_batch_size": 0}}, ['"target_batch_size"']),
        ({"opt": {"run_id": "a", "target_batch_size": True}}, ['"target_batch_size"']),
        ({"opt": {**OPT, "target_batchsize": 4}}, ["'target_batchsize'", "'target_batch_size'"]),
        ({"opt": {**OPT, "matchmaking": 4}}, ["'matchmaking'", "'matchmaking_time'"]),
        ({"opt": OPT, "dht": {"inital_peers": []}}, ["'inital_peers'", "'initial_peers'"]),
        ({"opt": OPT, "dht": {"p2p": 1}}, ["'p2p'"]),
        ({"opt": OPT, "dht": {"initial_peers": 5}}, ["list of addresses"]),
        ({"opt": {**OPT, "optimizer": 1}}, ["the Trainer makes it"]),
        ({"opt": {**OPT, "use_local_updates": True}}, ["cannot be had", "whole swarm"]),
        ({"opt": {**OPT, "auxiliary": True}}, ["cannot be had"]),
        ({"opt": {**OPT, "reuse_grad_buffers": True}}, ["reuse_grad_buffers", "clears the gradients", "Leave it out"]),
        ({"opt": {**OPT, "grad_compression": "uniform9"}}, ["'uniform9'", "'uniform8'"]),
        ({"opt": {**OPT, "average_state_every": 2}}, ["average_state_every", "Leave it out"]),
        ({"opt": {**OPT, "commits": False}}, ["always vote", "Leave it out"]),
        ({"opt": {**OPT, "max_staleness": 0}}, ["max_staleness", "from 1 to 16"]),
        ({"opt": {**OPT, "grad_compression": 8}}, ["name one of"]),
        ({"opt": {**OPT, "wait_for_peers": "two"}}, ["'two'", "such as 2"]),
        ({"opt": {**OPT, "delay_grad_averaging": True, "delay_optimizer_step": False}}, ["delay_optimizer_step"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told_with_the_way_out(config, words):
    with pytest.raises(SwarmError) as caught:
        read_hivemind_config(config)
    assert caught.value.kind == "bad_config" and all(word in str(caught.value) for word in words), caught.value


def test_arguments_with_objects_in_them_can_be_logged(tmp_path):
    arguments = SwarmTrainingArguments(
        str(tmp_path), hivemind_config={"dht": {}, "opt": {**OPT, "grad_compression": Uniform8BitQuantization()}}
    )
    assert "Uniform8BitQuantization" in arguments.to_json_string()
    assert read_hivemind_config(arguments.hivemind_config).options.grad_codec is CODECS["uniform8"]


def test_it_may_come_from_a_command_line(tmp_path):
    config = {"dht": {}, "opt": OPT}
    (tmp_path / "swarm.json").write_text(json.dumps(config))
    parser = HfArgumentParser(SwarmTrainingArguments)
    for given in (json.dumps(config), str(tmp_path / "swarm.json")):
        (found,) = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--hivemind_config", given])
        assert found.hivemind_config == config
    for wrong in ("{not json", "nowhere.json"):
        with pytest.raises(SwarmError, match="neither JSON nor a file"):
            parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--hivemind_config", wrong])
