"""Token ids of responses to text and back: byte-level, byte-fallback and space-prefixing tokenizers."""

import re
import string
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer

# Texts put before a response so that a space-prefixing tokenizer prefixes them instead. Several, because a
# vocabulary may merge one of them with what follows.
_ANCHORS = ("\n", "\x01", "|", "=", "0", "a")

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class UnrepresentableTextError(ValueError):
    """No plain-text ids of this tokenizer decode to the text."""


class ResponseCodec:
    """Text that a response adds after a prompt <-> ids of one tokenizer.

    description: the JSON of the `tokenizers` backend. stop_id stands for the prompt when decoding, because
    decoders strip the first space of a sequence. control_ids never come out of `encode`.
    """

    def __init__(self, description: str, *, stop_id: int, control_ids: Iterable[int]) -> None:
        self._backend = Tokenizer.from_str(description)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True  # control tokens in a text stay text
        added = self._backend.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special}
        self._stop_id = stop_id
        self._control_ids = frozenset({*control_ids, *special, stop_id})
        self._plain_added = {token.content: i for i, token in added.items() if i not in self._control_ids}
        self._known_ids = frozenset(self._backend.get_vocab(with_added_tokens=True).values())
        self._decoders = _decoder_types(description)
        self._stop_text = self._backend.decode([stop_id], skip_special_tokens=False)
        self._prefixes_space = self._detect_space_prefix()

    def decode(self, ids: Sequence[int] | np.ndarray) -> tuple[str, bool]:
        """(text, valid) of ids [L], special tokens as text, a leading space included.

        Not valid: the ids' own bytes are not UTF-8 (a cut inside a character), or an id has no token.
        """
        plain = np.asarray(ids, dtype=np.int64).tolist()
        text = self._text_after_prompt(plain)
        if not self._known_ids.issuperset(plain):
            return text, False
        # A replacement character may also be what the model wrote: only the bytes can tell.
        return text, "\ufffd" not in text or self._is_utf8(plain)

    def encode(self, text: str) -> np.ndarray:
        """int32 ids [L] with decode(prompt + ids) = decode(prompt) + text, up to Unicode normalisation.

        Text that spells a control token is encoded as text; added tokens that are not special keep their
        single id. Raises UnrepresentableTextError if this vocabulary cannot do that.
        """
        ids = self._encode(text)
        if not self._control_ids.isdisjoint(ids):
            # Some models hold control tokens as ordinary vocabulary entries: cut their spelling in two.
            ids = [i for piece in self._cut_control_tokens(text) for i in self._encode(piece)]
        if not self._control_ids.isdisjoint(ids) or not self._spells(ids, text):
            raise UnrepresentableTextError(f"no plain token ids decode to {text[:60]!r}")
        return np.array(ids, dtype=np.int32)

    def _encode(self, text: str) -> list[int]:
        if not self._prefixes_space:
            return self._encode_alone(text)
        # Each stretch of text after an added token may be prefixed too, so each gets its own anchor.
        pieces = re.split(f"({_any_of(self._plain_added)})", text) if self._plain_added else [text]
        ids: list[int] = []
        for piece in pieces:
            if piece in self._plain_added:
                ids.append(self._plain_added[piece])
            elif piece:
                ids += self._encode_anchored(piece)
        return ids

    def _encode_alone(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def _encode_anchored(self, text: str) -> list[int]:
        for anchor in _ANCHORS:
            head, whole = self._encode_alone(anchor), self._encode_alone(anchor + text)
            if whole[: len(head)] == head and self._spells(whole[len(head) :], text):
                return whole[len(head) :]
        return self._encode_alone(text)  # not exact, which `encode` finds

    def _cut_control_tokens(self, text: str) -> list[str]:
        pattern = _any_of(self._backend.decode([i], skip_special_tokens=False) for i in self._control_ids)
        cuts = [0, *(match.start() + 1 for match in re.finditer(pattern, text)), len(text)]
        return [text[start:end] for start, end in pairwise(cuts)]

    def _text_after_prompt(self, ids: list[int]) -> str:
        text = self._backend.decode([self._stop_id, *ids], skip_special_tokens=False)
        return text.removeprefix(self._stop_text)

    def _spells(self, ids: list[int], text: str) -> bool:
        decoded = self._text_after_prompt(ids)
        # Some tokenizers compose characters (Qwen: NFC): the same characters are the same text.
        return decoded == text or _composed(decoded) == _composed(text)

    def _detect_space_prefix(self) -> bool:
        """Whether text that is encoded alone comes out after a prompt with a space before it."""
        for character in string.ascii_letters + string.digits + string.punctuation:
            added = self._text_after_prompt(self._encode_alone(character))
            if added in (character, " " + character):
                return added != character
        return False

    def _is_utf8(self, ids: list[int]) -> bool:
        try:
            b"".join(self._bytes_of(i) for i in ids).decode("utf-8")
        except UnicodeDecodeError:
            return False
        return True

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        assert token is not None
        if "ByteLevel" in self._decoders and all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        if "ByteFallback" in self._decoders and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return token.encode("utf-8")


class _Description(msgspec.Struct):
    decoder: dict[str, Any] | None


def _any_of(texts: Iterable[str]) -> str:
    """Regular expression that matches any of the texts, the longest first."""
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _decoder_types(description: str) -> set[str]:
    decoder = msgspec.json.decode(description, type=_Description).decoder
    return {decoder["type"], *(part["type"] for part in decoder.get("decoders", []))} if decoder else set()


def spells_everything(description: str) -> bool:
    """Whether a tokenizer is sure to have tokens for any text: byte-level BPE with all bytes, before which
    nothing is taken away. False where that is not plain to see."""
    parts = msgspec.json.decode(description)
    before = parts["pre_tokenizer"] or {"type": None}
    steps = before.get("pretokenizers", [before])
    return (
        parts["model"]["type"] == "BPE"
        and _BYTE_OF.keys() <= parts["model"]["vocab"].keys()
        and (parts["decoder"] or {"type": None})["type"] == "ByteLevel"
        and (parts["normalizer"] or {"type": "NFC"})["type"] in ("NFC", "NFKC")
        and "ByteLevel" in {step["type"] for step in steps}
        and all(step["type"] in ("ByteLevel", "Split", "Digits") for step in steps)
        and all(step.get("behavior") != "Removed" for step in steps)
    )


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (GPT-2): printable bytes as themselves, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()
