"""Captions to integers: one token a word for scenes, and never a failure."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hub import Hub
from volunteer_kit.data.errors import DataError
from volunteer_kit.data.scenes import all_scenes
from volunteer_kit.data.tokenizer import load_tokenizer

WORDS = load_tokenizer("words")


def test_every_word_of_a_scene_is_one_token():
    assert WORDS.vocab_size == 512
    for scene in all_scenes(1) + all_scenes(2)[::97]:
        ids = WORDS.encode(scene.caption, 16)
        assert len(ids) == 16 and sum(i != 0 for i in ids) == len(scene.caption.split()) <= 14
        assert WORDS.decode(ids) == scene.caption


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_no_caption_fails_and_nothing_is_lost(caption):
    ids = WORDS.encode(caption, 400)
    assert len(ids) == 400 and all(0 <= i < WORDS.vocab_size for i in ids)
    even = " ".join(caption.encode("utf-8", "replace").decode().lower().split())
    assert WORDS.decode(ids) == even


def test_surrogates_and_endless_captions():
    assert WORDS.decode(WORDS.encode("x\ud800y", 8)) == "x?y"
    assert len(WORDS.encode("word " * 10**6, 16)) == 16


def test_truncation_and_padding():
    assert WORDS.encode("a red circle", 2) == WORDS.encode("a red", 2)
    assert WORDS.encode("a red", 4)[2:] == [0, 0]
    assert WORDS.encode("", 3) == [0, 0, 0]
    with pytest.raises(ValueError, match="outside"):
        WORDS.decode([512])


def test_ids_never_change():
    """A swarm averages embeddings by position: another vocabulary would be another model."""
    assert WORDS.encode("a large red circle on the left of a grey background, ünsafe", 20) == [
        257, 258, 259, 260, 261, 262, 263, 264, 257, 265, 266, 45, 33, 196, 189, 111, 116, 98, 103, 102,
    ]  # fmt: skip


def test_a_tokenizer_file(tmp_path):
    import tokenizers
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    for pad, shift in (({"<pad>": 0, "[UNK]": 1, "red": 2}, 0), ({"[UNK]": 0, "red": 1}, 1)):
        made = tokenizers.Tokenizer(WordLevel(pad, unk_token="[UNK]"))
        made.pre_tokenizer = Whitespace()
        made.enable_padding(length=7)
        made.save(str(tmp_path / "tokenizer.json"))
        loaded = load_tokenizer(f"file:{tmp_path / 'tokenizer.json'}")
        assert loaded.vocab_size == len(pad) + shift
        assert loaded.encode("red red what", 5) == [pad["red"] + shift] * 2 + [pad["[UNK]"] + shift, 0, 0]
        assert loaded.encode("red red", 1) == [pad["red"] + shift]
        assert loaded.decode(loaded.encode("red", 4)) == "red"
        loaded.encode("\ud800", 2)


@pytest.mark.parametrize("name", ["", "word", "hub:", "file:", "pickle:x"])
def test_unknown_names_say_what_there_is(name):
    with pytest.raises(DataError, match="There is no text tokenizer .*words"):
        load_tokenizer(name)


def test_a_file_that_is_no_tokenizer(tmp_path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(DataError, match="is no tokenizer.json"):
        load_tokenizer(f"file:{tmp_path / 'x.json'}")


@pytest.mark.parametrize("model", ["WordLevel", "WordPiece"])
def test_a_tokenizer_that_fails_at_words_it_does_not_know_is_refused(model, tmp_path):
    """Else the first caption with such a word would end the reading of data."""
    import tokenizers

    made = tokenizers.Tokenizer(getattr(tokenizers.models, model)({"red": 0}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"fails at words that it does not know[^\n]*\n1\. .*unk_token"):
        load_tokenizer(f"file:{tmp_path / 'tokenizer.json'}")


def test_without_a_network_the_hub_says_what_to_do(tmp_path):
    code = "from volunteer_kit.data.tokenizer import load_tokenizer; load_tokenizer('hub:t5-small')"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    last = run.stderr.split("DataError: ")[-1]
    assert run.returncode == 1 and "hub:t5-small is neither in the cache nor" in last
    assert "1. " in last and "2. " in last and "hf download t5-small tokenizer.json" in last


def test_a_tokenizer_of_the_hub_is_downloaded_once(tmp_path):
    import tokenizers
    from tokenizers.models import WordLevel

    made = tokenizers.Tokenizer(WordLevel({"<pad>": 0, "[UNK]": 1, "red": 2}, unk_token="[UNK]"))
    with Hub() as hub, hub.client(tmp_path / "home") as ask:
        hub.add("models", "t5-small", {"tokenizer.json": made.to_str().encode()}, revisions=("main", "v1"))
        hub.fail("tokenizer.json", times=1, cut_after=20)
        assert ask(_encode, "hub:t5-small", "red", 3) == [2, 0, 0]
        downloads = [asked for asked in hub.asked if "tokenizer.json" in asked.path]
        assert [asked.method for asked in downloads].count("HEAD") == 2  # its size before, and the client's own
        assert ask(_encode, "hub:t5-small@v1", "blue", 2) == [1, 0]
        with pytest.raises(DataError, match="hub:t5-small@v2 is neither in the cache nor"):
            ask(_encode, "hub:t5-small@v2", "red", 3)
        hub.forget()
        assert ask(_encode, "hub:t5-small", "red", 3) == [2, 0, 0] and not hub.asked
    with hub.client(tmp_path / "home") as ask:  # another day, without a network
        assert ask(_encode, "hub:t5-small", "red", 3) == [2, 0, 0]


def _encode(name: str, caption: str, length: int) -> list[int]:
    return load_tokenizer(name).encode(caption, length)
