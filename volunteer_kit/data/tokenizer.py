"""Captions to integers and back: the small tokenizer that ships with the kit, or one from the Hub."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from volunteer_kit.http_client import blamed_on_proxy

from .errors import DataError

if TYPE_CHECKING:
    import tokenizers

PAD = 0
MAX_FILE = 128 * 2**20  # bytes of a tokenizer.json; the largest known have some 35 MB
MAX_CAPTION = 4000  # characters; what comes after never fits a model's text length
LONGEST_REMEMBERED = 32  # characters of a word whose tokens are kept
STRANGE = "\ue000 qzЖ猫7 \U0010fffd"  # words that hardly a vocabulary has


class Tokenizer(Protocol):
    """What the stream needs: `vocab_size` ids of which 0 is the padding."""

    name: str
    vocab_size: int

    def encode(self, caption: str, length: int) -> list[int]:
        """Exactly `length` ids: what is longer is cut, what is shorter is padded with 0. Never fails."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of ids, padding left out. Raises ValueError for an id outside the vocabulary."""
        ...


def load_tokenizer(name: str) -> Tokenizer:
    """A tokenizer by name: "words" ships with the kit; "hub:t5-small" or "hub:ORG/NAME@REVISION" loads
    tokenizer.json from the Hugging Face Hub or its cache; "file:PATH" reads such a file. Raises DataError."""
    kind, _, rest = name.partition(":")
    if name == "words":
        return WordTokenizer()
    if kind == "hub" and rest:
        return HubTokenizer(name, _fetch(rest))
    if kind == "file" and rest:
        return HubTokenizer(name, Path(rest))
    raise DataError(
        f'There is no text tokenizer {name!r}. Choose "words" (ships with the kit, {len(_words()) + 257} tokens),'
        ' "hub:NAME" (for example hub:t5-small) or "file:PATH" of a tokenizer.json.'
    )


@lru_cache(maxsize=1)
def _words() -> tuple[str, ...]:
    return tuple(json.loads(resources.files(__package__).joinpath("words.json").read_text("utf-8")))


class WordTokenizer:
    """Common words and pieces of words, each one token, and single bytes for everything else.

    Id 0 is the padding, 1..256 are the bytes, then come the entries of words.json; an entry that begins a word
    begins with a space. The longest entry wins, from left to right, so that a caption of scenes is one token a
    word. Captions are lower-cased and their spacing is made even; `decode` gives that form back exactly.
    """

    name = "words"

    def __init__(self) -> None:
        self._entries = _words()
        self._ids = {entry: 257 + n for n, entry in enumerate(self._entries)}
        self._longest = max(map(len, self._entries))
        self.vocab_size = 257 + len(self._entries)
        self._of_word = lru_cache(maxsize=2**14)(self._split)

    def encode(self, caption: str, length: int) -> list[int]:
        ids: list[int] = []
        for word in caption[:MAX_CAPTION].lower().split():
            ids += self._of_word(word) if len(word) <= LONGEST_REMEMBERED else self._split(word)
            if len(ids) >= length:
                break
        return (ids + [PAD] * length)[:length]

    def _split(self, word: str) -> list[int]:
        """The tokens of one word; no entry reaches over two."""
        text, ids, at = f" {word}", [], 0
        while at < len(text):
            for end in range(min(at + self._longest, len(text)), at, -1):
                if (found := self._ids.get(text[at:end])) is not None:
                    ids.append(found)
                    at = end
                    break
            else:
                ids.extend(1 + byte for byte in text[at].encode("utf-8", "replace"))
                at += 1
        return ids

    def decode(self, ids: list[int]) -> str:
        parts = []
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"token {i} is outside the vocabulary of {self.vocab_size}")
            if i != PAD:
                parts.append(bytes([i - 1]) if i <= 256 else self._entries[i - 257].encode())
        return b"".join(parts).decode("utf-8", "replace").strip()


class HubTokenizer:
    """A `tokenizers` file as the Hub has them. Special tokens are not added, as in the original run; where id 0
    is not the file's padding, all ids move up by one."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._tokenizer = _read(name, path)
        pads = {self._tokenizer.token_to_id(token) for token in ("<pad>", "[PAD]", "<|pad|>")}
        self._shift = 0 if PAD in pads else 1
        self.vocab_size = self._tokenizer.get_vocab_size() + self._shift
        try:
            self._ids(STRANGE)
        except Exception as error:  # the Rust binding raises plain Exception
            raise DataError(
                f"The text tokenizer {name}: {path} fails at words that it does not know ({error}).\n"
                "1. Give its model a token for them (unk_token), or name another tokenizer."
            ) from error

    def encode(self, caption: str, length: int) -> list[int]:
        try:
            ids = self._ids(caption[:MAX_CAPTION])
        except Exception:  # of words that are stranger still: the picture counts without its caption
            ids = []
        return ([i + self._shift for i in ids[:length]] + [PAD] * length)[:length]

    def _ids(self, text: str) -> list[int]:
        text = text.encode("utf-8", "replace").decode()  # lone surrogates would raise
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"token {i} is outside the vocabulary of {self.vocab_size}")
        return self._tokenizer.decode([i - self._shift for i in ids if i != PAD])


def _fetch(name: str) -> Path:
    """tokenizer.json of a Hub repository, from the cache or downloaded."""
    from huggingface_hub import constants, hf_hub_download

    repo, _, revision = name.partition("@")
    where = {"repo_id": repo, "filename": "tokenizer.json", "revision": revision or None}
    try:
        return Path(hf_hub_download(**where, local_files_only=True))
    except (OSError, ValueError):
        pass  # not in the cache yet
    from .hub_client import require_size

    require_size(repo, "tokenizer.json", revision, MAX_FILE)
    try:
        return Path(hf_hub_download(**where, etag_timeout=10))
    except Exception as error:  # huggingface_hub, its HTTP client and the file system each have their own
        if trouble := blamed_on_proxy(constants.ENDPOINT, error):
            raise DataError(f"The text tokenizer hub:{name} cannot be downloaded: {trouble}") from error
        raise DataError(
            f"The text tokenizer hub:{name} is neither in the cache nor can it be downloaded "
            f"({type(error).__name__}).\n"
            "1. Check the network and the name, then try again.\n"
            "2. For a private or gated repository log in first: hf auth login\n"
            f"3. Or fetch it where there is a network: hf download {repo} tokenizer.json"
            " and say file:PATH/tokenizer.json, or choose the tokenizer that ships: words"
        ) from error


def _read(name: str, path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        if not path.is_file():  # a FIFO would be waited for
            raise FileNotFoundError("there is no such file")
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust binding raises plain Exception
        raise DataError(
            f"The text tokenizer {name}: {path} is no tokenizer.json ({error}).\n"
            "1. Delete the file so that it is fetched anew, or name another one."
        ) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
