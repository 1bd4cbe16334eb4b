"""Computes vectors from token ids with sentence-transformers, bypassing its tokenizer.

Ids are padded, masked and passed through the model's own modules, so a vector equals
`SentenceTransformer.encode` of the text, or of its truncation. The loader verifies this on probe texts,
because a model may depend on more than token ids (a chat template, an image).
"""

import time
from math import inf
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer
from transformers.utils.logging import disable_progress_bar

from backends.embedding import time_model
from backends.embedding.cuda_allocator import CudaMemory
from backends.embedding.handshake import EncoderFacts, EncoderOptions
from backends.embedding.ipc import Ids, PassResult, Rows
from backends.embedding.memory_model import EmbeddingMemory, fit_memory_model, prior
from backends.embedding.pair_template import PairTemplate, split_types
from backends.embedding.profiling import memory_points, time_points, trim_heap
from backends.embedding.time_model import PassTime
from backends.embedding.truncation import Truncation

_PROBES = ["", "Tandem", "  Two kinds of work share one device, and neither waits for long."]
# Tokens of text left of a truncated probe; the longest probe has more.
_TRUNCATED_PROBE_TOKENS = 4
_TOLERANCE = {torch.float32: 1e-4}
_HALF_PRECISION_TOLERANCE = 3e-2  # half precision differs in the second digit by the padding alone
# oneDNN's error when memory runs out; it caches the failure and repeats it for the same shape.
_PERMANENT_FAILURE = "could not create a primitive"
# The CPU allocator and CUDA libraries that allocate outside PyTorch raise a plain RuntimeError.
_OUT_OF_MEMORY_MARKS = (
    *("can't allocate memory", "not enough memory", "could not create a memory", _PERMANENT_FAILURE),
    *("CUDA error: out of memory", "_STATUS_ALLOC_FAILED"),
)


class Unsupported(RuntimeError):
    """The model cannot be served from token ids; the message states the reason and the remedy."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error reports exhausted memory, on a CPU or a GPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _OUT_OF_MEMORY_MARKS)


def _lanes(device: torch.device, threads: int) -> tuple[int, int]:
    """Returns (passes computed concurrently, threads of each).

    On a CPU two passes with half the threads each have more throughput than one pass with all, because the
    serial parts of one overlap with the other.
    """
    if device.type != "cpu" or threads < 2:
        return 1, threads
    return 2, threads // 2


class Encoder:
    """A loaded model, and the properties of it that the server needs."""

    def __init__(self, options: EncoderOptions) -> None:
        disable_progress_bar()
        self._model = self._load(
            options.model,
            device=options.device,
            trust_remote_code=options.trust_remote_code,
            model_kwargs={} if options.dtype is None else {"dtype": options.dtype},
        )
        self._model.eval()
        self.lanes, self._lane_threads = _lanes(self.device, options.threads or torch.get_num_threads())
        self.idle_cpu_priority = options.idle_cpu_priority and self.device.type == "cpu"
        self.set_thread_count()
        self._set_normalization(normalize=options.normalize)
        self.tokenizer = self._fast_tokenizer(options.model)
        self.raw_tokenizer = self._make_raw_tokenizer()
        self._read_special_tokens()
        self.max_input_tokens = self._resolve_max_input_tokens(options.max_input_tokens)
        self.vocabulary = int(self._transformer().get_input_embeddings().num_embeddings)
        self._has_token_types = "token_type_ids" in self.tokenizer.model_input_names
        self._pads_left = self.tokenizer.padding_side == "left"
        self._pad_id = int(self.tokenizer.pad_token_id or 0)
        self.dimension = self._verify()
        self._cuda_memory = CudaMemory(self.device) if self.device.type == "cuda" else None

    def _load(self, model: str, **settings: Any) -> Any:
        return SentenceTransformer(model, **settings)

    def _read_special_tokens(self) -> None:
        """Reads from the tokenizer how inputs are made of texts."""
        self._pairs: PairTemplate | None = None
        self._truncation = Truncation.of(self.raw_tokenizer, self.tokenizer.truncation_side)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return torch.device(self._model.device)

    def set_thread_count(self) -> None:
        """Sets torch's thread count; called in each thread that computes."""
        torch.set_num_threads(self._lane_threads)

    def facts(self, batch_tokens: int) -> EncoderFacts:
        """Profiles the model with some passes. Raises Unsupported if the device has no memory for them."""
        pass_time, memory = self._profile(batch_tokens)
        return EncoderFacts(
            dimension=self.dimension,
            max_input_tokens=self.max_input_tokens,
            vocabulary=self.vocabulary,
            weight_bytes=sum(p.numel() * p.element_size() for p in self._model.parameters()),
            device=str(self.device),
            lanes=self.lanes,
            idle_cpu_priority=self.idle_cpu_priority,
            time=pass_time,
            memory=memory,
            tokenizer=self.raw_tokenizer.to_str(),
            truncation=self._truncation,
            prompts=self._prompts(),
            default_prompt=self._model.default_prompt_name,
            pairs=self._pairs,
        )

    def run_pass(self, lengths: Ids, ids: Ids) -> PassResult:
        """Computes `vectors` and measures the pass: nanoseconds, and on CUDA its peak and reserved bytes."""
        if self._cuda_memory is not None:
            self._cuda_memory.begin_pass()
        start = time.perf_counter_ns()
        rows = self.vectors(lengths, ids)
        elapsed = time.perf_counter_ns() - start
        if self._cuda_memory is None:
            return PassResult(rows, elapsed, 0, 0)
        return PassResult(
            rows, elapsed, self._cuda_memory.pass_peak_bytes(), self._cuda_memory.trim_reserved()
        )

    @property
    def reserved_bytes(self) -> int:
        """Bytes that CUDA's caching allocator has reserved; 0 on other devices."""
        return 0 if self._cuda_memory is None else self._cuda_memory.reserved_bytes

    def release(self) -> None:
        """Returns the allocator's cached memory to the device or the system."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.trim()

    def trim(self) -> None:
        """Returns the heap's free memory to the system if passes are computed in it, on a CPU."""
        if self.device.type == "cpu":
            trim_heap()

    def vectors(self, lengths: Ids, ids: Ids) -> Rows:
        """Vectors, float32 [inputs, dimension]; `ids` is the concatenation of all inputs."""
        width = int(lengths.max())
        columns = np.arange(width)
        if self._pads_left:
            mask = columns >= width - lengths[:, None].astype(np.int64)
        else:
            mask = columns < lengths[:, None]
        padded = np.full(mask.shape, self._pad_id, dtype=np.int64)
        padded[mask], types = split_types(ids)
        features: dict[str, Any] = {
            "input_ids": torch.from_numpy(padded).to(self.device),
            "attention_mask": torch.from_numpy(mask.astype(np.int64)).to(self.device),
        }
        if self._has_token_types:
            padded_types = np.zeros(mask.shape, dtype=np.int64)
            padded_types[mask] = types
            features["token_type_ids"] = torch.from_numpy(padded_types).to(self.device)
        with torch.inference_mode():
            found: Rows = self._rows(features).float().cpu().numpy()
        return found

    def _rows(self, features: dict[str, Any]) -> torch.Tensor:
        """Computes one row per input."""
        rows: torch.Tensor = self._model(features)["sentence_embedding"][:, : self._model.truncate_dim]
        return rows

    def is_fatal(self, error: Exception) -> bool:
        """Whether this process cannot compute any more: a lost CUDA context, or a cached oneDNN failure."""
        if self.device.type != "cuda":
            return _PERMANENT_FAILURE in str(error)
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            return True
        return False

    def _profile(self, batch_tokens: int) -> tuple[PassTime, EmbeddingMemory]:
        compute, device, longest = self._run_filler, self.device, self.max_input_tokens
        try:
            times = time_points(compute, device, longest=longest, batch_tokens=batch_tokens)
            pass_time = time_model.fit_time_model(times)
            pass_tokens = pass_time.full_speed_tokens(batch_tokens)
            points = memory_points(compute, device, longest=longest, pass_tokens=pass_tokens)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise Unsupported(
                f"a pass of {batch_tokens} tokens, or of one input of {longest}, does not fit into "
                f"the memory of {device}; lower batch_tokens or max_input_tokens"
            ) from error
        if self._cuda_memory is not None:
            self._cuda_memory.cap_reserved()
        if points is not None:
            return pass_time, fit_memory_model(points, dimension=self.dimension)
        element = next(self._model.parameters()).element_size()
        config = self._transformer().config.to_dict()
        return pass_time, prior(config, bytes_per_element=element, dimension=self.dimension)

    def _run_filler(self, inputs: int, length: int) -> None:
        """Runs a pass of filler tokens.

        Several inputs are padded by one token, because a pass without padding has no mask and is cheaper.
        """
        lengths = np.full(inputs, length, dtype=np.uint32)
        lengths[-1] -= inputs > 1 and length > 1
        self.vectors(lengths, np.full(lengths.sum(), min(5, self.vocabulary - 1), dtype=np.uint32))

    def _prompts(self) -> dict[str, str]:
        """The model's prompts. Raises Unsupported if it excludes their tokens from pooling."""
        stated = {name: text for name, text in (self._model.prompts or {}).items() if text}
        if stated and any(getattr(module, "include_prompt", True) is False for module in self._model):
            raise Unsupported(
                "the model excludes prompt tokens from pooling, but token ids do not mark them; "
                "serve another model"
            )
        return stated

    def _set_normalization(self, *, normalize: bool | None) -> None:
        from sentence_transformers.models import Normalize

        names = [name for name, module in self._model.named_children() if isinstance(module, Normalize)]
        if normalize is False:
            for name in names:
                delattr(self._model, name)
        elif normalize is True and not names:
            self._model.append(Normalize())

    def _transformer(self) -> Any:
        return self._model[0].auto_model

    def _fast_tokenizer(self, name: str) -> Any:
        tokenizer = self._model.tokenizer
        if not getattr(tokenizer, "is_fast", False):
            raise Unsupported(
                f"model {name!r}: its tokenizer has no fast version, which the server needs; "
                "save the model with a tokenizer.json and serve that folder"
            )
        return tokenizer

    def _make_raw_tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self.tokenizer.backend_tokenizer.to_str())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def _resolve_max_input_tokens(self, wanted: int | None) -> int:
        positions = getattr(self._transformer().config, "max_position_embeddings", None)
        limit = positions if isinstance(positions, int) and positions > 0 else None
        # In RoBERTa models the first position follows the position of the padding token.
        padding_position = getattr(
            getattr(self._transformer().base_model, "embeddings", None), "padding_idx", None
        )
        if limit is not None and padding_position is not None:
            limit -= padding_position + 1
        if wanted is not None:
            if limit is not None and wanted > limit:
                raise Unsupported(f"max_input_tokens={wanted}: the model has {limit} positions; lower it")
            return wanted
        own = self._model.max_seq_length
        found = min((n for n in (own, limit) if n is not None), default=None)
        if found is None or found > 10**9:
            raise Unsupported("the model states no maximum length; set max_input_tokens")
        return int(found)

    def _verify(self) -> int:
        """Returns the dimension. Raises Unsupported if token ids alone do not reproduce `encode`."""
        found = self.raw_tokenizer.encode_batch(_PROBES)
        # The empty text has no tokens if the model adds no special tokens.
        probes = {text: encoded.ids for text, encoded in zip(_PROBES, found, strict=True) if encoded.ids}
        short = min(self.max_input_tokens, self._truncation.special_tokens + _TRUNCATED_PROBE_TOKENS)
        self._verify_at_length(probes, short)
        return self._verify_at_length(probes, self.max_input_tokens)

    def _verify_at_length(self, probes: dict[str, list[int]], limit: int) -> int:
        self._model.max_seq_length = limit
        expected = np.asarray(self._model.encode([*probes], prompt="", show_progress_bar=False))
        inputs = [np.array(self._truncation.truncate(ids, limit), dtype=np.uint32) for ids in probes.values()]
        return self._verify_rows(inputs, expected, f"encode() for texts of at most {limit} tokens")

    def _verify_rows(self, inputs: list[Ids], expected: Rows, reference: str) -> int:
        """Returns the length of a row. Raises Unsupported if the rows of `inputs` differ from `expected`."""
        found = self.vectors(np.array([len(ids) for ids in inputs], dtype=np.uint32), np.concatenate(inputs))
        tolerance = _TOLERANCE.get(next(self._model.parameters()).dtype, _HALF_PRECISION_TOLERANCE)
        is_alike = found.shape == expected.shape
        gap = (
            float(np.abs(found - expected).max() / max(1.0, float(np.abs(expected).max())))
            if is_alike
            else inf
        )
        if not gap <= tolerance:
            raise Unsupported(
                f"results from token ids differ from {reference} by {gap:.2g} (at most {tolerance:g}): the "
                "model needs more than token ids; serve another model"
            )
        return int(found.shape[1])
