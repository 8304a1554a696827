"""Orders of a monitor whose node gives them, against a node of which the test is the other end."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from volunteer_kit.auth.access_token import KeysError
from volunteer_kit.checkpoint import save_checkpoint
from volunteer_kit.monitor.kept import Kept
from volunteer_kit.monitor.signing import GivenOrder, LastOrder, Signing
from volunteer_kit.swarm.node.member import order_number
from volunteer_kit.swarm.sync.entries import RollbackOrder

LINEAGE = bytes(range(32))
NUMBER = order_number(2, 9)


class Node:
    """Stands in for Member where it handles orders."""

    def __init__(self):
        self.last_order, self.follows, self.epochs = None, True, {}
        self.given = []

    def epoch_of(self, lineage):
        return self.epochs.get(lineage)

    def order_back(self, tensors, about, sign):
        self.given.append((tensors, about, sign(b"digest")))
        if self.follows:
            self.last_order = LastOrder(NUMBER, LINEAGE)
        return RollbackOrder(2, 9, 31, LINEAGE, ())


@pytest.fixture
def scene(tmp_path):
    meta = {"epoch": 20, "lineage": LINEAGE.hex(), "numbers": [], "order": 0, "fingerprint": "f"}
    path = save_checkpoint(tmp_path, {"w": torch.ones(2)}, meta)
    kept = SimpleNamespace(all=[Kept(20, 0, LINEAGE.hex(), path.name)], checkpoints=tmp_path)
    signer = SimpleNamespace(sign=lambda kind, digest: kind.encode() + digest)
    own = SimpleNamespace(signer=lambda: signer)
    node, notes = Node(), Mock()
    node.order, node.epoch, node.own, node.run = NUMBER, 31, own, SimpleNamespace(fingerprint="f")
    signing = Signing(node, Mock(), kept, notes, followed_within=0.2)
    return SimpleNamespace(signing=signing, node=node, notes=notes, kept=kept)


def test_an_order_leads_to_a_checkpoint(scene):
    given = scene.signing.order(scene.kept.all[0])
    assert given == GivenOrder(NUMBER, 20, 31, LINEAGE) == scene.signing.last_order()
    [(tensors, about, signature)] = scene.node.given
    assert torch.equal(tensors["w"], torch.ones(2)) and about["lineage"] == LINEAGE.hex()
    assert signature == b"orderdigest"
    scene.notes.warn.assert_not_called()


def no_keys():
    raise KeysError("the keys are gone")


@pytest.mark.parametrize("trouble", ["not followed", "no keys", "no checkpoint"])
def test_an_order_that_cannot_be_given_is_told(scene, trouble):
    if trouble == "not followed":
        scene.node.follows = False
    elif trouble == "no keys":
        scene.node.own.signer = no_keys
    else:
        (scene.kept.checkpoints / scene.kept.all[0].checkpoint / "meta.json").unlink()
    assert scene.signing.order(scene.kept.all[0]) is None
    scene.notes.warn.assert_called_once()


def test_anothers_order_is_found_by_its_lineage(scene):
    scene.kept.all = []
    assert scene.signing.last_order() is None
    scene.node.last_order = LastOrder(NUMBER, LINEAGE)
    assert scene.signing.last_order() is None, "nobody knows which step it was"
    scene.node.epochs[LINEAGE] = 18
    assert scene.signing.last_order() == GivenOrder(NUMBER, 18, 31, LINEAGE)
