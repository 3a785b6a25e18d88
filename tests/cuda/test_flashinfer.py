"""What FlashInfer's cuDNN is told of a batch: derived, bucketed, made once, and checked where the caller tells too."""

import pytest
import torch
from hal_attn_cuda.flashinfer import FlashInferCudnnBackend, bucketed
from hal_attn_cuda.simulated.flashinfer import SimulatedFlashInfer, simulated_flashinfer

from hal_attn import PackedSequences, reference_varlen_attention, varlen_attention
from hal_attn.errors import InvalidAttentionInputError
from tests.cuda.calls import HALF
from tests.support import packed, randn


class Recorder(SimulatedFlashInfer):
    """Keeps the arguments of each call."""

    def cudnn_batch_prefill_with_kv_cache(self, *arguments, **options):
        calls.append(options)
        return super().cudnn_batch_prefill_with_kv_cache(*arguments, **options)


calls: list[dict[str, object]] = []


@pytest.fixture
def backend():
    calls.clear()
    return FlashInferCudnnBackend(lambda: Recorder(float("nan")), lambda device: "sm90")


def hook(backend, query, key, value, sequences, **options):
    return backend.forward_varlen(
        query,
        key,
        value,
        cu_seqlens=sequences.cu_seqlens,
        max_seqlen=sequences.max_seqlen,
        cu_seqlens_host=sequences.cu_seqlens_host,
        **options,
    )


def test_offsets_count_elements_of_each_tensor(backend):
    """Grouped heads, another value head dim, and a query that is a view of a wider tensor."""
    sequences = PackedSequences.from_lengths([3, 1, 5])
    query = randn(9, 3, 4, 16, seed=1, dtype=HALF)[:, 0]
    key, value = randn(9, 2, 16, seed=2, dtype=HALF), randn(9, 2, 16, seed=3, dtype=HALF)
    output = hook(backend, query, key, value, sequences)
    right, _ = reference_varlen_attention(query, key, value, sequences)
    torch.testing.assert_close(output.double(), right, rtol=0.02, atol=0.02)
    starts = [0, 3, 4, 9, 9, 9, 9, 9, 9]
    (told,) = calls
    for name, row in (("q", 3 * 4 * 16), ("k", 2 * 16), ("v", 2 * 16), ("o", 4 * 16)):
        offsets = told[f"batch_offsets_{name}"]
        assert offsets.dtype == torch.int32
        assert offsets.tolist() == [start * row for start in starts]
    assert told["actual_seq_lens_q"].flatten().tolist() == [3, 1, 5, 0, 0, 0, 0, 0]
    assert told["actual_seq_lens_q"].shape == (8, 1, 1, 1)
    assert (told["max_token_per_sequence"], told["max_sequence_kv"]) == (128, 128)


def test_products_beyond_32_bits_are_made_in_64(backend):
    """Not reached through a request, which is refused there; the product itself must not wrap on the way."""
    sequences = PackedSequences.from_lengths([2**20, 2**20])
    metadata = backend.metadata_builder().build(sequences, _request(sequences))
    assert (metadata.starts * 1000).tolist()[:3] == [0, 1_048_576_000, 2_097_152_000]
    assert metadata.starts.dtype == torch.int64
    assert metadata.elements(False, 1000).tolist()[2] == 2_097_152_000


@pytest.mark.parametrize(
    ("number", "least", "bucket"), [(1, 8, 8), (8, 8, 8), (9, 8, 16), (129, 128, 256), (4096, 128, 4096)]
)
def test_buckets_are_powers_of_two(number, least, bucket):
    assert bucketed(number, least) == bucket


def test_batches_of_one_bucket_share_a_plan(backend):
    for lengths in ([100, 90, 3], [128], [7] * 8):
        query, key, value, sequences = packed(lengths, dtype=HALF)
        hook(backend, query, key, value, sequences)
    plans = {
        (call["actual_seq_lens_q"].shape, call["max_token_per_sequence"], call["batch_offsets_q"].shape)
        for call in calls
    }
    assert len(plans) == 1


def test_metadata_is_made_once_for_all_layers(simulate):
    simulate()
    query, key, value, sequences = packed([3, 9], dtype=HALF)
    first = {
        name: varlen_attention(query, key, value, sequences=sequences, backend="flashinfer_cudnn") for name in "ab"
    }
    assert torch.equal(first["a"], first["b"])
    made = [value for key, value in sequences._memo.items() if isinstance(key, tuple) and key[0] == "metadata"]
    assert len(made) == 1
    assert len(made[0]._elements) == 2


@pytest.mark.parametrize(
    "given",
    [torch.tensor([3, 9]), torch.tensor([3, 9, 0, 0]).view(-1, 1, 1, 1), torch.tensor([3, 9], dtype=torch.int32)],
)
def test_sequence_lengths_that_agree_are_honoured(backend, given):
    query, key, value, sequences = packed([3, 9], dtype=HALF)
    alone = hook(backend, query, key, value, sequences)
    assert torch.equal(hook(backend, query, key, value, sequences, sequence_lengths=given), alone)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (torch.tensor([3, 8]), "8 for sequence 1"),
        (torch.tensor([3, 9, 2]), "2 for sequence 2"),
        (torch.tensor([3]), "one for each of 2 sequences"),
        (torch.tensor([3.0, 9.0]), "whole numbers"),
    ],
)
def test_sequence_lengths_that_differ_are_an_error(backend, given, words):
    query, key, value, sequences = packed([3, 9], dtype=HALF)
    with pytest.raises(InvalidAttentionInputError, match="sequence_lengths") as caught:
        hook(backend, query, key, value, sequences, sequence_lengths=given)
    assert words in str(caught.value)


def test_without_cudnns_python_package_it_is_unavailable():
    library = SimulatedFlashInfer(float("nan"), CUDNN_AVAILABLE=False)
    reason = FlashInferCudnnBackend(lambda: library, lambda device: "sm90").unavailable()
    assert "nvidia-cudnn-frontend" in str(reason)
    assert FlashInferCudnnBackend(simulated_flashinfer, lambda device: "sm90").unavailable() is None


def _request(sequences):
    from hal_attn.validation import packed_request

    tokens = sum(sequences.lengths)
    tensor = torch.empty(1, 1, 8, dtype=HALF).expand(tokens, 1, 8)
    return packed_request(tensor, tensor, tensor, sequences, {})
