"""One agent's tokenizer: prompts to ids, its responses to text, other agents' texts to its ids."""

import hashlib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from megatron_hacpo.bridge.text import ResponseCodec, spells_everything

PLACEHOLDER = "{prompt}"

Messages = Sequence[dict[str, str]]
"""Of one prompt."""


@dataclass(frozen=True, eq=False, kw_only=True)
class AgentTokenizer:
    """An agent's tokenizer, made by `load` and not changed afterwards.

    stop_id: the token that ends a stopped response in this agent's views.
    stop_ids: everything that the engine must stop at, `stop_id` first, then those of generation_config.json.
    vocab_size: largest token id plus one; the model's embedding may be larger.
    fingerprint: equal for tokenizers between which a token id means the same.
    """

    path: Path
    stop_id: int
    stop_ids: tuple[int, ...]
    vocab_size: int
    fingerprint: str
    chat_template: str | None
    plain_template: str | None
    bos_id: int | None
    adds_bos: bool
    _spells_everything: bool
    _hf: Any
    _prompts: Tokenizer
    _responses: ResponseCodec

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        chat_template: str | None = None,
        plain_template: str | None = None,
        stop_token: str | None = None,
        trust_remote_code: bool = False,
    ) -> "AgentTokenizer":
        """Read the tokenizer of a Hugging Face folder; nothing is downloaded.

        chat_template: Jinja text instead of the folder's own chat template.
        plain_template: text with "{prompt}" instead of any chat template (base models).
        stop_token: one token of the vocabulary instead of the tokenizer's eos_token.
        Raises ValueError for a missing or broken folder, a tokenizer without the `tokenizers` backend, a bad
        plain template, an unknown stop token or none.
        """
        folder = Path(path)
        if chat_template is not None and plain_template is not None:
            raise ValueError(f"tokenizer {folder}: chat_template and plain_template are both set: keep one")
        if plain_template is not None and PLACEHOLDER not in plain_template:
            raise ValueError(
                f"tokenizer {folder}: no {PLACEHOLDER} in plain_template {plain_template!r}: add it"
            )
        hf = _load_folder(folder, trust_remote_code=trust_remote_code)
        prompts: Tokenizer = hf.backend_tokenizer
        description = prompts.to_str()
        prompts.no_truncation()
        prompts.no_padding()
        bos_id = hf.bos_token_id
        stop_id = _stop_id(folder, hf, prompts, stop_token)
        stop_ids = tuple(dict.fromkeys([stop_id, *_generation_stop_ids(folder)]))
        return cls(
            path=folder,
            stop_id=stop_id,
            stop_ids=stop_ids,
            vocab_size=max(prompts.get_vocab(with_added_tokens=True).values()) + 1,
            fingerprint=_fingerprint(description),
            chat_template=chat_template,
            plain_template=plain_template,
            bos_id=bos_id,
            adds_bos=bos_id is not None and prompts.encode("a").ids[:1] == [bos_id],
            _spells_everything=spells_everything(description),
            _hf=hf,
            _prompts=prompts,
            _responses=ResponseCodec(
                description, stop_id=stop_id, control_ids=[*hf.all_special_ids, *stop_ids]
            ),
        )

    @property
    def identity(self) -> str:
        """Equal for tokenizers with which an agent reads the same prompts and ends its responses alike."""
        template = self.plain_template or self.chat_template or self._hf.chat_template
        meaning = [self.fingerprint, template, self.stop_ids, self.adds_bos]
        return hashlib.sha256(msgspec.json.encode(meaning)).hexdigest()

    def render_prompt(self, messages: Messages) -> list[int]:
        """Token ids of a prompt, up to where the response starts; see `render_prompts`."""
        return self.render_prompts([messages])[0]

    def render_prompts(self, prompts: Sequence[Messages]) -> list[list[int]]:
        """Token ids of each prompt, up to where the response starts.

        A plain template takes the contents of all messages, joined by an empty line. Exactly one BOS token
        where the tokenizer adds one or the template writes one, none otherwise.
        Raises ValueError if there is no template or the chat template refuses the messages.
        """
        if self.plain_template is not None:
            contents = ("\n\n".join(message["content"] for message in messages) for messages in prompts)
            texts = [self.plain_template.replace(PLACEHOLDER, content) for content in contents]
        elif self.chat_template is not None or self._hf.chat_template is not None:
            texts = self._render_chats(prompts)
        else:
            raise ValueError(
                f"tokenizer {self.path}: no chat template: set plain_template, for example {PLACEHOLDER!r}"
            )
        return [self._with_one_bos(ids) for ids in self._encoded(texts)]

    def lost_characters(self, prompts: Sequence[Messages]) -> list[str]:
        """Characters of each prompt's contents that this vocabulary has no token for, sorted."""
        if self._spells_everything:
            return [""] * len(prompts)
        contents = ["".join(message["content"] for message in messages) for messages in prompts]
        decoded = self._prompts.decode_batch(self._encoded(contents), skip_special_tokens=False)
        return [_absent(text, back) for text, back in zip(contents, decoded, strict=True)]

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        """All at once: the backend has a thread for each core."""
        return [found.ids for found in self._prompts.encode_batch_fast(texts, add_special_tokens=False)]

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        if self.bos_id is None:
            return ids
        while ids[:2] == [self.bos_id, self.bos_id]:
            ids = ids[1:]
        return [self.bos_id, *ids] if self.adds_bos and ids[:1] != [self.bos_id] else ids

    def _render_chats(self, prompts: Sequence[Messages]) -> list[str]:
        try:
            return self._apply_chat_template(prompts) if prompts else []
        except Exception:  # a template is a program: it may raise anything, and does not say for which prompt
            for messages in prompts:
                self._refuse_what_fails(messages)
            raise

    def _refuse_what_fails(self, messages: Messages) -> None:
        """ValueError if the chat template does not take the messages."""
        try:
            self._apply_chat_template([messages])
        except Exception as error:
            said = _short(" ".join(f"{type(error).__name__}: {error}".split()), 200)
            raise ValueError(
                f"tokenizer {self.path}: the chat template fails on the prompt "
                f"{_short(messages[-1]['content'], 60)!r} ({said}): change the messages or set chat_template"
            ) from error

    def _apply_chat_template(self, prompts: Sequence[Messages]) -> list[str]:
        return self._hf.apply_chat_template(
            [list(messages) for messages in prompts],
            chat_template=self.chat_template,
            add_generation_prompt=True,
            tokenize=False,
            enable_thinking=False,  # as the paper runs Qwen3; other templates ignore it
        )

    def decode_response(self, ids: Sequence[int] | np.ndarray) -> tuple[str, bool]:
        """(text, valid) of sampled ids [L]: special tokens as text, without the final stop token.

        Not valid: the bytes are cut inside a character, or an id lies outside the vocabulary.
        """
        body = ids[:-1] if len(ids) > 0 and int(ids[-1]) in self.stop_ids else ids
        return self._responses.decode(body)

    def encode_response(self, text: str) -> np.ndarray:
        """int32 ids [L] of a response's text, no stop token: decode(prompt + ids) = decode(prompt) + text.

        Text that spells a control token stays text. Raises UnrepresentableTextError if the vocabulary cannot
        spell the text.
        """
        return self._responses.encode(text)


def _absent(text: str, decoded: str) -> str:
    """The characters of a text that did not come back, sorted."""
    if text == decoded:
        return ""
    lost = set(unicodedata.normalize("NFKC", text)) - set(unicodedata.normalize("NFKC", decoded))
    return "".join(sorted(character for character in lost if not character.isspace()))


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + "..."


def _load_folder(folder: Path, *, trust_remote_code: bool) -> Any:
    if not folder.is_dir():
        raise ValueError(f"tokenizer {folder}: no such folder: give the path of a Hugging Face folder")
    try:
        hf = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # transformers and tokenizers raise everything up to plain Exception here
        reason = " ".join(str(error).split())
        raise ValueError(
            f"tokenizer {folder}: cannot be read, check its tokenizer.json ({reason})"
        ) from error
    if not hf.is_fast:
        raise ValueError(
            f"tokenizer {folder}: {type(hf).__name__} has no tokenizer.json (slow tokenizer): "
            "convert it to a fast one with transformers and save it there"
        )
    return hf


def _stop_id(folder: Path, hf: Any, backend: Tokenizer, stop_token: str | None) -> int:
    if stop_token is None:
        if hf.eos_token_id is None:
            raise ValueError(
                f"tokenizer {folder}: no eos_token: set stop_token to the token that ends a response"
            )
        return hf.eos_token_id
    ids = backend.encode(stop_token, add_special_tokens=False).ids
    if len(ids) != 1 or backend.decode(ids, skip_special_tokens=False) != stop_token:
        raise ValueError(f"tokenizer {folder}: stop_token {stop_token!r} is not one token of its vocabulary")
    return ids[0]


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def _generation_stop_ids(folder: Path) -> list[int]:
    file = folder / "generation_config.json"
    if not file.is_file():
        return []
    try:
        eos = msgspec.json.decode(file.read_bytes(), type=_GenerationConfig).eos_token_id
    except msgspec.MsgspecError as error:
        raise ValueError(
            f"tokenizer {folder}: {file.name} cannot be read ({error}): fetch it again"
        ) from None
    return eos if isinstance(eos, list) else [] if eos is None else [eos]


def _fingerprint(description: str) -> str:
    """Hash of what gives ids their meaning: vocabulary, merges, added tokens, normaliser, pre-tokeniser."""
    parts = msgspec.json.decode(description)
    meaning = {key: parts[key] for key in ("model", "normalizer", "pre_tokenizer")}
    # Not their flags: how a folder was saved decides which tokens are special, not what they stand for.
    meaning["added_tokens"] = sorted((token["id"], token["content"]) for token in parts["added_tokens"])
    return hashlib.sha256(msgspec.json.encode(meaning, order="deterministic")).hexdigest()
