"""The demo's encoder on the real weights: packed embeddings equal padded ones, and the attention is `hal_attn`'s."""

import pytest
import torch

import hal_attn
from hal_attn.demo import encoder as encoder_module
from hal_attn.demo.comparison import compare, count_steps, min_cosine
from hal_attn.demo.encoder import PackedBatch, PackedEncoder
from hal_attn.demo.model import load_config, model_folder, tokenise
from hal_attn.demo.padded import PaddedModel, padded_tokens
from hal_attn.demo.search import nearest
from hal_attn.demo.sentences import load_sentences

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder():
    return model_folder()


@pytest.fixture(scope="module")
def token_ids(folder):
    """Sixteen sentences in the order of the book, of 5 to 136 tokens."""
    return tokenise(load_sentences(16), folder)


@pytest.fixture(scope="module")
def encoder(folder):
    return PackedEncoder.from_folder(folder, CPU)


@pytest.fixture(scope="module")
def model(folder):
    return PaddedModel(folder, CPU)


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def test_text_is_many_different_sentences_of_very_different_lengths():
    sentences = load_sentences()
    words = [len(sentence.split()) for sentence in sentences]
    assert len(sentences) >= 300
    assert len(set(sentences)) == len(sentences)
    assert all(sentence == " ".join(sentence.split()) and sentence for sentence in sentences)
    assert min(words) == 1
    assert max(words) >= 100
    assert sum(count <= 10 for count in words) >= 50
    assert sum(count >= 40 for count in words) >= 25


@pytest.mark.parametrize(("limit", "count"), [(0, 0), (7, 7), (10_000, 373), (None, 373)])
def test_limit_keeps_the_first_sentences(limit, count):
    assert load_sentences(limit) == load_sentences()[:count]


def test_tokens_have_the_models_marks_and_no_padding_and_end_at_its_longest_sentence(folder):
    short, long = tokenise(["Oh dear!", "cat " * 400], folder)
    assert short == [101, 2821, 6203, 999, 102]
    assert len(long) == load_config(folder).max_seq_length == 256
    assert (long[0], long[-1]) == (101, 102)


def test_packed_embeddings_equal_the_models_own_padded_ones(encoder, model, token_ids):
    packed, padded = encoder(PackedBatch.of(token_ids, CPU)), model(token_ids)
    torch.testing.assert_close(packed, padded, rtol=0, atol=2e-5)
    torch.testing.assert_close(packed.norm(dim=-1), torch.ones(len(token_ids)))


def test_a_sentence_does_not_see_the_others_of_its_batch(encoder, token_ids):
    together = encoder(PackedBatch.of(token_ids, CPU))
    alone = torch.cat([encoder(PackedBatch.of([ids], CPU)) for ids in token_ids])
    torch.testing.assert_close(together, alone, rtol=0, atol=2e-5)


def test_every_layer_calls_varlen_attention_on_packed_tokens_with_the_same_sequences(encoder, token_ids, monkeypatch):
    calls = []

    def record(query, key, value, *, sequences, backend):
        calls.append((query.shape, sequences))
        return hal_attn.varlen_attention(query, key, value, sequences=sequences, backend=backend)

    monkeypatch.setattr(encoder_module, "hal_attn", _With(hal_attn, varlen_attention=record))
    batch = PackedBatch.of(token_ids, CPU)
    encoder(batch)
    tokens = sum(len(ids) for ids in token_ids)
    assert [shape for shape, _ in calls] == [(tokens, 12, 32)] * 6
    assert all(sequences is batch.sequences for _, sequences in calls)
    assert batch.sequences.lengths == tuple(len(ids) for ids in token_ids)


@pytest.mark.parametrize("backend", ["cpu_flash", "cpu_sdpa", "cpu_math"])
def test_each_backend_gives_the_same_embeddings_and_is_the_one_explained(folder, encoder, token_ids, backend):
    named = PackedEncoder.from_folder(folder, CPU, backend)
    batch = PackedBatch.of(token_ids, CPU)
    torch.testing.assert_close(named(batch), encoder(batch), rtol=0, atol=2e-5)
    selection = named.explain(batch)
    assert selection.chosen.name == backend
    assert selection.source == f"backend {backend}"


def test_the_encoder_has_no_attention_but_that_of_hal_attn(encoder, token_ids, monkeypatch):
    monkeypatch.setenv("HAL_ATTN_DISABLED_BACKENDS", ",".join(status.name for status in hal_attn.backends("cpu")))
    batch = PackedBatch.of(token_ids, CPU)
    assert encoder.explain(batch).chosen is None
    with pytest.raises(hal_attn.UnsupportedAttentionError, match="cpu_math"):
        encoder(batch)


def test_comparison_counts_tokens_and_steps_and_keeps_the_order_of_sentences(encoder, model, token_ids):
    ticks = []
    runs = compare(
        encoder, model, token_ids, CPU, batch_size=5, repeats=1, tick=lambda: ticks.append(1)
    )  # 16 sentences: 5, 5, 5 and 1
    lengths = [len(ids) for ids in token_ids]
    by_length = sorted(lengths, reverse=True)
    assert [run.tokens for run in runs] == [
        sum(lengths),
        sum(padded_tokens(lengths[start : start + 5]) for start in range(0, 16, 5)),
        sum(padded_tokens(by_length[start : start + 5]) for start in range(0, 16, 5)),
    ]
    assert len(ticks) == count_steps(16, batch_size=5, repeats=1) == 12
    assert all(run.seconds > 0 for run in runs)
    for run in runs:
        torch.testing.assert_close(run.embeddings, model(token_ids), rtol=0, atol=2e-5)
    assert 0.99999 <= min_cosine(runs) <= 1.0000001


def test_min_cosine_is_that_of_the_worst_sentence_in_any_run(encoder, model, token_ids):
    runs = compare(encoder, model, token_ids, CPU, batch_size=8, repeats=1, tick=lambda: None)
    runs[2].embeddings[3] = -runs[2].embeddings[3]
    assert min_cosine(runs) == pytest.approx(-1.0, abs=1e-5)


def test_padded_tokens_are_the_longest_times_the_number():
    assert padded_tokens([3, 9, 4]) == 27
    assert padded_tokens([]) == 0


def test_nearest_is_the_best_first_and_never_more_than_there_are():
    embeddings = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]), dim=-1)
    found = nearest(torch.tensor([0.0, 1.0]), embeddings, 5)
    assert [match.index for match in found] == [2, 1, 0]
    assert [match.score for match in found] == pytest.approx([1.0, 0.5**0.5, 0.0])
    assert nearest(torch.tensor([0.0, 1.0]), embeddings, 1) == found[:1]


class _With:
    """A module with some names replaced."""

    def __init__(self, module, **names):
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name):
        return getattr(self._module, name)
