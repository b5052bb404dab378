"""Small real tokenizers of the families that agents have, saved as Hugging Face folders."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "hello world, this is the answer: \\boxed{42}\n\n",
    "the hello of the world 123 + 456 = 579 <im_end> think end\n",
    "caf\u00e9 na\u00efve \u4f60\u597d \U0001f642 fa\u00e7ade\n",
    "a<|b<|c<|d<|e\n",
] * 5
CHAT = (
    "{{ bos_token or '' }}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


def save(folder: Path, tokenizer: Tokenizer, **options: Any) -> Path:
    """Write the tokenizer as a Hugging Face folder."""
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options).save_pretrained(str(folder))
    return folder


def with_bos(tokenizer: Tokenizer, bos: str) -> Tokenizer:
    """Let encoding add a BOS token, as Llama's and Mistral's tokenizers do."""
    bos_id = tokenizer.token_to_id(bos)
    tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])
    return tokenizer


def byte_level(*, normalizer: Any = None, specials: tuple[str, ...] = (), merges: int = 100) -> Tokenizer:
    """Byte-level BPE; <think> and </think> are added tokens that are not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256 + merges, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([*specials])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ("<think>", "</think>")])
    return tokenizer


def qwen(folder: Path, **options: Any) -> Path:
    """Byte-level, NFC, no BOS, chat template, stops with <|im_end|>."""
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer = byte_level(normalizer=normalizers.NFC(), specials=specials)
    return save(folder, tokenizer, **{"eos_token": "<|im_end|>", "chat_template": CHAT, **options})


def llama3(folder: Path, **options: Any) -> Path:
    """Byte-level with a BOS that both the tokenizer and the chat template write."""
    specials = ("<|begin_of_text|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>")
    tokenizer = with_bos(byte_level(specials=specials, merges=60), "<|begin_of_text|>")
    defaults = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "chat_template": CHAT}
    return save(folder, tokenizer, **{**defaults, **options})


def sentencepiece(folder: Path, *, legacy: bool) -> Path:
    """BPE with byte fallback and a prefixed space: Llama-2's way (legacy) or Mistral's."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=150, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [piece for piece in model["vocab"] if piece not in pieces and piece not in "\n"]
    merges = [tuple(pair) for pair in model["merges"] if all("\n" not in side for side in pair)]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    if legacy:
        replace = normalizers.Replace(" ", "\u2581")
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return save(folder, with_bos(tokenizer, "<s>"), bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def unigram(folder: Path) -> Path:
    """Unigram with Metaspace; its control tokens are ordinary entries of the vocabulary."""
    characters = [(c, -4.0) for c in "abcdehlorstw<>/=0123456789"]
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("\u2581", -3.0), ("\u2581hello", -3.5)]
    tokenizer = Tokenizer(models.Unigram([*pieces, *characters], unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return save(folder, tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def characters(folder: Path) -> Path:
    """One token per character of a small alphabet, nothing else."""
    alphabet = ["<unk>", "<eos>", *"0123456789+-=()CM"]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(alphabet)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return save(folder, tokenizer, eos_token="<eos>", unk_token="<unk>")
