"""Compiled packed calls: any lengths by one graph, however the caller says them."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

from hal_attn import PackedSequences, explain, pack, unpack, varlen_attention
from tests.compile.cases import LENGTHS, LENGTHS_K, PACKED, packed
from tests.compile.tracing import Program, gradients, leaves, same
from tests.support import CPU_BACKENDS, assert_close_to_oracle, expected


def run(query, key, value, sequences, tensors, options):
    return varlen_attention(query, key, value, sequences=sequences, **tensors, **options)


def alike(program, name, lengths, lengths_k=None, backend=None):
    made, sequences, options, tensors = packed(name, lengths, lengths_k)
    inputs, wanting = leaves(*made), {key: leaves(tensor)[0] for key, tensor in tensors.items()}
    options = {**options, "backend": backend}
    result, right = (f(*inputs, sequences, wanting, options) for f in (program, run))
    same(result, right, name)
    every = (*inputs, *wanting.values())
    same(gradients(result, every), gradients(right, every), f"{name}: gradients")
    with torch.no_grad():
        same(program(*inputs, sequences, tensors, options), run(*inputs, sequences, tensors, options), "inference")
    return result


@pytest.mark.parametrize("other_keys", [False, True], ids=["", "other key lengths"])
@pytest.mark.parametrize("name", PACKED)
def test_each_option_with_changing_lengths_is_compiled_once(name, other_keys):
    program, graphs = Program(run, dynamic=True), []
    for lengths, lengths_k in zip(LENGTHS, LENGTHS_K, strict=True):
        result = alike(program, name, lengths, lengths_k if other_keys else None)
        graphs.append(program.graphs)
    assert len(set(graphs)) == 1, "other lengths were compiled anew"
    made, sequences, options, tensors = packed(name, lengths, lengths_k if other_keys else None)
    right = expected(*made, sequences=sequences, **{k: v for k, v in options.items() if k != "return_lse"}, **tensors)
    output = result[0] if isinstance(result, tuple) else result
    assert_close_to_oracle(output, right.output, right.plain_output)


def test_static_shapes_take_other_lengths_of_as_many_rows():
    program = Program(run, dynamic=False)
    graphs = []
    for lengths in ([3, 5], [8], [1, 2, 5], [4, 4]):
        alike(program, "causal", lengths)
        graphs.append(program.graphs)
    assert len(set(graphs)) == 1


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_each_backend(backend):
    made, sequences, _, _ = packed("plain", [3, 5])
    refusals = {c.backend.name: c.refusals for c in explain(*leaves(*made), sequences=sequences).considered}
    assert not refusals[backend]
    alike(Program(run), "plain", [3, 5], backend=backend)


def by_offsets(query, key, value, places):
    return varlen_attention(query, key, value, causal=True, **places)


WAYS = {
    "offsets": lambda s: {"cu_seqlens": s.cu_seqlens},
    "offsets in int64": lambda s: {"cu_seqlens": s.cu_seqlens.long()},
    "offsets and the longest": lambda s: {"cu_seqlens": s.cu_seqlens, "max_seqlen": s.max_seqlen + 2},
    "the longest as a tensor": lambda s: {"cu_seqlens": s.cu_seqlens, "max_seqlen": torch.tensor(s.max_seqlen)},
    "a tensor on the host": lambda s: {"cu_seqlens": s.cu_seqlens, "cu_seqlens_host": s.cu_seqlens.clone()},
    "both sides": lambda s: {
        "cu_seqlens": s.cu_seqlens,
        "cu_seqlens_k": s.cu_seqlens.clone(),
        "max_seqlen": s.max_seqlen,
        "max_seqlen_k": s.max_seqlen,
        "cu_seqlens_k_host": s.cu_seqlens.clone(),
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_offsets_that_change_are_compiled_once(way):
    program, graphs = Program(by_offsets, dynamic=True), []
    for lengths in ([3, 5], [2, 7], [6, 1, 4], [9, 3]):
        made, sequences, _, _ = packed("plain", lengths)
        inputs, places = leaves(*made), WAYS[way](sequences)
        result, right = program(*inputs, places), by_offsets(*inputs, places)
        same(result, right)
        same(result, varlen_attention(*made, sequences=sequences, causal=True))
        same(gradients(result, inputs), gradients(right, inputs))
        graphs.append(program.graphs)
    assert len(set(graphs)) == 1, "other offsets were compiled anew"


def test_host_offsets_as_numbers_are_compiled_once_for_each_number_of_sequences():
    program, graphs = Program(by_offsets, dynamic=True), []
    for lengths in ([3, 5], [2, 7], [6, 3], [2, 3, 4], [5, 6, 7]):
        made, sequences, _, _ = packed("plain", lengths)
        places = {"cu_seqlens": sequences.cu_seqlens, "cu_seqlens_host": sequences.cu_seqlens_host}
        same(program(*made, places), by_offsets(*made, places))
        graphs.append(program.graphs)
    assert graphs[0] == graphs[1] == graphs[2] < graphs[3] == graphs[4]


@pytest.mark.parametrize("lengths_k", [None, [4, 6]])
def test_sequences_made_in_the_program(lengths_k):
    def inside(query, key, value):
        return varlen_attention(query, key, value, sequences=PackedSequences.from_lengths([3, 5], lengths_k))

    made, _, _, _ = packed("plain", [3, 5], lengths_k)
    inputs = leaves(*made)
    result, right = Program(inside)(*inputs), inside(*inputs)
    same(result, right)
    same(gradients(result, inputs), gradients(right, inputs))


def test_sequences_that_a_module_or_a_closure_holds():
    class Layer(torch.nn.Module):
        def forward(self, query, key, value):
            return varlen_attention(query, key, value, sequences=self.sequences, causal=True)

    layer = Layer()
    program, graphs = Program(layer, dynamic=True), []
    for lengths in ([3, 5], [2, 2, 7], [9]):
        made, layer.sequences, _, _ = packed("plain", lengths)
        same(program(*made), layer(*made))
        graphs.append(program.graphs)
    assert len(set(graphs)) == 1


def test_padded_batches_are_packed_and_unpacked_in_the_program():
    def model(padded):
        packed_rows = pack(padded, [3, 5])
        sequences = PackedSequences.from_lengths([3, 5])
        return unpack(varlen_attention(packed_rows, packed_rows, packed_rows, sequences=sequences), [3, 5])

    (padded,) = leaves(torch.randn(2, 5, 4, 16))
    result, right = Program(model)(padded), model(padded)
    same(result, right)
    # One tensor is query, key and value: its gradient is a sum, in any order.
    torch.testing.assert_close(gradients(result, (padded,)), gradients(right, (padded,)))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_of_sequences_cross_too(copied):
    made, sequences, _, _ = packed("plain", [3, 5])
    sequences.offsets(torch.device("cpu"))
    same(Program(run)(*made, copied(sequences), {}, {}), run(*made, sequences, {}, {}))


def test_sequences_made_in_inference_mode_serve_training():
    with torch.inference_mode():
        made, sequences, _, _ = packed("plain", [3, 5])
        same(Program(run)(*made, sequences, {}, {}), run(*made, sequences, {}, {}))
    alike(Program(run), "plain", [3, 5])
    inputs = leaves(*packed("plain", [3, 5])[0])
    result, right = Program(run)(*inputs, sequences, {}, {}), run(*inputs, sequences, {}, {})
    same(gradients(result, inputs), gradients(right, inputs))


def test_a_program_keeps_no_sequences():
    program = Program(run)
    made, sequences, _, _ = packed("plain", [3, 5])
    program(*leaves(*made), sequences, {}, {})
    gone = weakref.ref(sequences)
    gc.disable()
    try:
        del sequences
        assert gone() is None
    finally:
        gc.enable()


def test_layers_share_what_is_prepared_for_a_batch(monkeypatch):
    from hal_attn import buckets

    built = []
    build = buckets.PaddedMetadataBuilder.build
    monkeypatch.setattr(buckets.PaddedMetadataBuilder, "build", lambda *a: built.append(1) or build(*a))

    def two_layers(query, key, value, sequences):
        once = varlen_attention(query, key, value, sequences=sequences, causal=True)
        return varlen_attention(once, key, value, sequences=sequences, causal=True)

    made, sequences, _, _ = packed("plain", [3, 5, 2])
    Program(two_layers)(*made, sequences)
    two_layers(*made, sequences)
    assert len(built) == 1
