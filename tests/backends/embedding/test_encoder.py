"""Profiling passes of the encoder, and models that it rejects."""

import numpy as np
import pytest

from tests.backends.embedding.real_worker import BUDGET

pytestmark = [pytest.mark.engine, pytest.mark.untimed]


@pytest.fixture(scope="module")
def encoder():
    from backends.bundled_models import MINILM, resolve
    from backends.embedding.encoder import Encoder
    from backends.embedding.handshake import EncoderOptions

    return Encoder(EncoderOptions(model=resolve(MINILM), batch_tokens=BUDGET, threads=1))


def test_a_profiled_pass_has_padding(encoder):
    """Without padding there is no mask, and kernels without a mask are cheaper than usual ones."""
    masks = []
    hook = encoder._model[0].register_forward_pre_hook(
        lambda _, given: masks.append(given[0]["attention_mask"])
    )
    try:
        for inputs, length in ((3, 16), (1, 16), (2, 1)):
            encoder._run_filler(inputs, length)
    finally:
        hook.remove()
    assert [tuple(mask.shape) for mask in masks] == [(3, 16), (1, 16), (2, 1)]
    assert [int((mask == 0).sum()) for mask in masks] == [1, 0, 0]


def test_positions_after_the_padding_token_reduce_the_longest_input(tmp_path, encoder):
    """As in RoBERTa; one token too many would fail inside a device kernel."""
    from transformers import XLMRobertaConfig, XLMRobertaModel

    from backends.embedding.encoder import Encoder, Unsupported
    from backends.embedding.handshake import EncoderOptions

    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = XLMRobertaConfig(
        vocab_size=encoder.vocabulary, max_position_embeddings=40, type_vocab_size=2,
        pad_token_id=encoder.tokenizer.pad_token_id, **size,
    )  # fmt: skip
    XLMRobertaModel(config).save_pretrained(tmp_path)
    encoder.tokenizer.save_pretrained(tmp_path)
    most = 40 - config.pad_token_id - 1
    made = Encoder(EncoderOptions(model=str(tmp_path), batch_tokens=BUDGET, threads=1, max_input_tokens=most))
    assert made.vectors(np.array([most], np.uint32), np.full(most, 9, np.uint32)).shape == (1, 16)
    with pytest.raises(Unsupported, match=f"{most} positions"):
        Encoder(
            EncoderOptions(model=str(tmp_path), batch_tokens=BUDGET, threads=1, max_input_tokens=most + 1)
        )


def test_max_input_tokens_above_the_positions_is_refused():
    from backends.bundled_models import MINILM, resolve
    from backends.embedding.encoder import Encoder, Unsupported
    from backends.embedding.handshake import EncoderOptions

    with pytest.raises(Unsupported, match="max_input_tokens=1000: the model has 512 positions; lower it"):
        Encoder(EncoderOptions(model=resolve(MINILM), batch_tokens=BUDGET, threads=1, max_input_tokens=1_000))
