"""The demo door: what it measures, of models and of what they draw."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from volunteer_kit.checkpoint import load_checkpoint, save_checkpoint
from volunteer_kit.data.scenes import all_scenes, is_held_out
from volunteer_kit.demo.eval import (
    MAX_GAP,
    checker_accuracy,
    compare,
    derangement,
    held_out_scenes,
    largest_gap,
    reconstruction_error,
    score_scenes,
    tensor_gap,
)


class TestGap:
    def test_equal_bits_have_no_gap_whatever_they_are(self):
        for tensor in (torch.zeros(3), torch.randn(4, 5), torch.arange(5), torch.zeros(0)):
            assert tensor_gap(tensor, tensor.clone()) == 0

    def test_gap_is_relative_to_the_tensor_and_symmetric(self):
        a, b = torch.tensor([1.0, -4.0]), torch.tensor([1.0, -4.002])
        assert tensor_gap(a, b) == pytest.approx(0.002 / 4, rel=1e-3)
        assert tensor_gap(a, b) == tensor_gap(b, a)
        assert tensor_gap(1000 * a, 1000 * b) == pytest.approx(tensor_gap(a, b), rel=1e-4)

    def test_nothing_hides(self):
        one = torch.ones(3)
        assert tensor_gap(torch.zeros(3), one) == math.inf
        assert tensor_gap(one, torch.tensor([1.0, 1.0, math.nan])) == math.inf
        assert tensor_gap(one, torch.ones(4)) == math.inf
        assert tensor_gap(one, one.half()) == math.inf
        assert largest_gap({"a": one}, {"b": one}) == math.inf
        assert largest_gap({"a": one, "b": one}, {"a": one, "b": one + 1e-3}) == pytest.approx(1e-3, rel=1e-2)

    def checkpoints(self, folder: Path, *changes: dict, epochs=(7, 7, 7)):
        torch.manual_seed(0)
        base = {"w": torch.randn(8, 8), "optimizer/0/exp_avg": torch.randn(8, 8), "optimizer/0/step": torch.tensor(7)}
        saved = {}
        for number, (change, epoch) in enumerate(zip(changes, epochs, strict=False), 1):
            tensors = {name: tensor + change.get(name, 0) for name, tensor in base.items()}
            path = save_checkpoint(folder / str(number), tensors, {"epoch": epoch})
            saved[f"volunteer {number}"] = load_checkpoint(path)
        return saved

    def test_all_pairs_of_checkpoints_are_compared(self, tmp_path):
        saved = self.checkpoints(tmp_path, {}, {"w": 1e-3}, {})
        agreement = compare(saved, "volunteer 1", "volunteer 3")
        assert 1e-4 < agreement.max_param_gap < 1e-2
        assert agreement.late_gap == 0 and not agreement.is_close and not agreement.same_bytes

    def test_late_joiner_must_have_the_same_statistics(self, tmp_path):
        saved = self.checkpoints(tmp_path, {}, {}, {"optimizer/0/exp_avg": 0.01})
        agreement = compare(saved, "volunteer 1", "volunteer 3")
        assert agreement.max_param_gap == 0 and agreement.same_bytes
        assert agreement.late_gap > MAX_GAP

    def test_equal_models_of_different_epochs_do_not_agree(self, tmp_path):
        agreement = compare(self.checkpoints(tmp_path, {}, {}, epochs=(7, 8)), "volunteer 1", None)
        assert agreement.max_param_gap == 0 and agreement.late_gap is None and not agreement.is_close


class TestScenes:
    @pytest.mark.parametrize("level", [1, 2])
    def test_sixty_four_held_out_captions_with_as_few_repetitions_as_can_be(self, level):
        scenes = held_out_scenes(level)
        assert len(scenes) == 64 and all(is_held_out(scene) for scene in scenes)
        assert len(set(scenes)) == min(64, len(all_scenes(level, "held_out")))
        assert held_out_scenes(level) == scenes

    @pytest.mark.parametrize("level", [1, 2])
    def test_derangement_gives_everybody_another_caption_once(self, level):
        captions = [scene.caption for scene in held_out_scenes(level)]
        other = derangement(captions)
        assert sorted(other) == list(range(64))
        assert all(captions[i] != captions[j] for i, j in enumerate(other))

    def test_captions_that_are_all_the_same_cannot_be_exchanged(self):
        with pytest.raises(ValueError, match="cannot be exchanged"):
            derangement(["a"] * 4)

    def test_true_pictures_get_everything_right(self):
        scenes = held_out_scenes(1)
        scores = score_scenes(scenes, [scene.render() for scene in scenes], 1)
        assert scores.colour_match >= 0.98 and scores.caption_match >= 0.98
        assert scores.caption_match_shuffled == 0
        assert len(scores.checks) == 64

    def test_a_model_that_draws_one_picture_for_all_is_found_out(self):
        scenes = held_out_scenes(1)
        scores = score_scenes(scenes, [scenes[0].render()] * 64, 1)
        assert scores.caption_match <= 3 / 64 and scores.caption_match_shuffled <= 3 / 64
        assert score_scenes(scenes, [np.zeros((32, 32, 3), np.uint8)] * 64, 1).colour_match == 0

    @pytest.mark.parametrize("level", [1, 2])
    def test_checker_is_right_on_true_pictures(self, level):
        assert checker_accuracy(level) >= 0.98

    def test_reconstruction_error_is_a_root_mean_square(self):
        assert reconstruction_error(torch.zeros(2, 3, 4, 4), torch.full((2, 3, 4, 4), 0.25)) == pytest.approx(0.25)
