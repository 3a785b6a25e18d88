"""One measurement: whom it leaves out, and that the caller notices nothing."""

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hal_attn import PackedSequences, attention, explain, varlen_attention
from hal_attn.request import AttentionRequest
from hal_attn.tuning import measuring
from hal_attn.tuning.measuring import Trial, measure
from tests.fakes import BatchedFake, fresh, on_the_cpu  # noqa: F401
from tests.support import dense, packed


@pytest.fixture(autouse=True)
def timer(monkeypatch):
    """Every call takes a millisecond."""
    monkeypatch.setattr(measuring, "_timer", lambda device: lambda run, calls: run() and float(calls))


def trial_of(tensors, **options):
    return Trial(lambda backend: backend.forward, tensors, (), options)


def request_for(query, key, **changes):
    sizes = {"batch": query.shape[0], "seqlen_q": query.shape[1], "seqlen_k": key.shape[1]}
    tokens = {"tokens_q": query.shape[0] * query.shape[1], "tokens_k": key.shape[0] * key.shape[1]}
    about = {"heads": query.shape[2], "kv_heads": key.shape[2], "head_dim": query.shape[3]}
    about |= {"value_head_dim": query.shape[3], "dtype": query.dtype, "device": query.device, "packed": False}
    return AttentionRequest(**sizes, **tokens, **about, **changes)


def measured(*backends, tensors=None, trial=None, **changes):
    tensors = tensors or dense()
    return measure(backends, trial or trial_of(tensors), request_for(*tensors[:2], **changes))


class Wrong(BatchedFake):
    def forward(self, query, key, value, **options):
        return super().forward(query, key, value, **options) * 1.5


class WrongBackward(BatchedFake):
    def forward(self, query, key, value, **options):
        output = super().forward(query, key, value, **options)
        return output + (query - query.detach()) * 0.5


class Failing(BatchedFake):
    error = RuntimeError("no kernel image")

    def forward(self, query, key, value, **options):
        raise self.error


class Hungry(Failing):
    error = torch.OutOfMemoryError("too little")


def test_a_wrong_result_is_left_out_and_said(caplog):
    record, lasting = measured(Wrong("wrong"), BatchedFake("b"), BatchedFake("c"))
    assert {name for name, _ in record.milliseconds} == {"b", "c"}
    assert dict(record.left_out)["wrong"].startswith("its result differs from that of b, c: output is")
    assert "wrong is left out of the measurement: its result differs" in caplog.text
    assert lasting


def test_a_wrong_gradient_is_left_out():
    tensors = tuple(tensor.requires_grad_() for tensor in dense())
    record, _ = measured(WrongBackward("wrong"), BatchedFake("b"), BatchedFake("c"), tensors=tensors, needs_grad=True)
    assert "gradient of query" in dict(record.left_out)["wrong"]
    record, _ = measured(WrongBackward("wrong"), BatchedFake("b"), tensors=dense())
    assert record.left_out == ()


def test_one_that_fails_is_left_out():
    record, lasting = measured(Failing("failing"), BatchedFake("b"))
    assert dict(record.left_out) == {"failing": "it failed: RuntimeError: no kernel image"}
    assert [name for name, _ in record.milliseconds] == ["b"]
    assert lasting


def test_too_little_memory_says_nothing_for_ever():
    record, lasting = measured(Hungry("hungry"), BatchedFake("b"))
    assert [name for name, _ in record.milliseconds] == ["b"]
    assert not lasting


def test_nobody_is_left():
    record, _ = measured(Failing("one"), Failing("two"))
    assert record.milliseconds == ()
    assert len(record.left_out) == 2


class Noting(BatchedFake):
    """Keeps weak references to what it made, and what it was given."""

    def __init__(self, name):
        super().__init__(name)
        self.made, self.given, self.modes = [], [], []

    def forward(self, query, key, value, **options):
        torch.rand(3)  # as a kernel that advances the generator
        output = super().forward(query, key, value, **options)
        self.made.append(weakref.ref(output))
        self.given.append((query.detach(), query.stride(), query.requires_grad))
        self.modes.append(torch.is_grad_enabled())
        return output


def test_what_candidates_make_is_freed():
    one, two = Noting("one"), Noting("two")
    measured(one, two)
    gc.collect()
    assert one.made
    assert not any(made() is not None for made in (*one.made, *two.made))


def test_no_random_number_of_the_caller_is_drawn():
    torch.manual_seed(5)
    right = torch.rand(4)
    torch.manual_seed(5)
    measured(Noting("one"), Noting("two"))
    assert torch.equal(torch.rand(4), right)


def test_graph_gradients_and_hooks_of_the_caller_are_left_alone():
    saved, seen = [], []
    tensors = tuple(tensor.requires_grad_() for tensor in dense())
    tensors[0].register_hook(lambda gradient: seen.append("hook"))
    one = Noting("one")
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda packed: packed):
        measured(one, Noting("two"), tensors=tensors, needs_grad=True)
    assert (saved, seen) == ([], [])
    assert all(tensor.grad is None for tensor in tensors)
    assert all(requires for *_, requires in one.given)


def test_checkpointing_a_measured_call(monkeypatch, tmp_path):
    """Non-reentrant checkpointing counts what is saved, forward and again backward."""
    monkeypatch.setenv("HAL_ATTN_AUTOTUNE", "on")
    monkeypatch.setenv("HAL_ATTN_CACHE_DIR", str(tmp_path))
    on_the_cpu(monkeypatch, BatchedFake("one"), BatchedFake("two"))
    tensors = tuple(tensor.requires_grad_() for tensor in dense())
    output = torch.utils.checkpoint.checkpoint(attention, *tensors, use_reentrant=False)
    output.sum().backward()
    assert all(tensor.grad is not None for tensor in tensors)
    assert explain(*tensors).source == "measurement"


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_gradients_as_the_request_wants_them(wanted, mode):
    one = Noting("one")
    tensors = tuple(tensor.requires_grad_(wanted) for tensor in dense())
    with mode():
        record, _ = measured(one, Noting("two"), tensors=tensors, needs_grad=wanted and mode is nullcontext)
    assert {requires for *_, requires in one.given} == {wanted and mode is nullcontext}
    assert set(one.modes) == {wanted and mode is nullcontext}
    assert not record.left_out


def test_values_are_its_own_with_the_strides_of_the_caller():
    """A warm-up often brings zeros, on which every kernel is right; and NaN in what nobody reads."""
    one = Noting("one")
    query, key, value = (torch.full((2, 4, 5, 8), torch.nan).transpose(1, 2) for _ in range(3))
    record, _ = measured(one, Wrong("wrong"), BatchedFake("plain"), tensors=(query, key, value))
    assert list(dict(record.left_out)) == ["wrong"]
    given, strides, _ = one.given[0]
    assert strides == query.stride()
    assert given.isfinite().all()
    assert given.std() > 0.5


def test_shapes_without_memory_are_enough():
    tensors = tuple(torch.empty(1).expand(2, 5, 4, 8) for _ in range(3))
    one = Noting("one")
    measured(one, Noting("two"), tensors=tensors)
    assert one.given[0][0].is_contiguous()


def test_option_tensors_keep_their_values_and_want_gradients_where_the_caller_does():
    tensors, sinks = dense(), torch.arange(4.0).requires_grad_()
    seen = []

    class Sinking(BatchedFake):
        def forward(self, query, key, value, **options):
            seen.append((options["sinks"].tolist(), options["sinks"].requires_grad))
            return super().forward(query, key, value, **options)

    measured(
        Sinking("one"),
        Sinking("two"),
        tensors=tensors,
        trial=trial_of(tensors, sinks=sinks),
        sinks=True,
        needs_option_grad=("sinks",),
    )
    assert set(map(str, seen)) == {str(([0.0, 1.0, 2.0, 3.0], True))}
    assert sinks.grad is None


def test_the_lse_is_compared_too():
    class WrongLse(BatchedFake):
        def forward(self, query, key, value, **options):
            output, lse = super().forward(query, key, value, return_lse=True, **options)
            return output, lse * 1.4427

    class Lse(BatchedFake):
        def forward(self, query, key, value, **options):
            return super().forward(query, key, value, return_lse=True, **options)

    record, _ = measured(WrongLse("base two"), Lse("b"), Lse("c"), return_lse=True)
    assert dict(record.left_out)["base two"].endswith("is allowed")
    assert "LSE is" in dict(record.left_out)["base two"]


def test_plans_of_losers_are_not_kept_with_the_sequences(monkeypatch, tmp_path):
    monkeypatch.setenv("HAL_ATTN_AUTOTUNE", "on")
    monkeypatch.setenv("HAL_ATTN_CACHE_DIR", str(tmp_path))
    on_the_cpu(monkeypatch, BatchedFake("one"), BatchedFake("two"))
    *tensors, _ = packed([3, 5])
    sequences = PackedSequences.from_lengths([3, 5])
    varlen_attention(*tensors, sequences=sequences)
    kept = len(sequences._memo)
    sequences = PackedSequences.from_lengths([3, 5])
    monkeypatch.setenv("HAL_ATTN_AUTOTUNE", "off")
    varlen_attention(*tensors, sequences=sequences)
    assert kept == len(sequences._memo)


# When nothing can be measured


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def test_obstacles(monkeypatch):
    assert trial_of(dense()).obstacle() == ""
    with Watching():
        assert "TorchDispatchMode" in trial_of(dense()).obstacle()
    assert "Subclass" in trial_of(tuple(tensor.as_subclass(Subclass) for tensor in dense())).obstacle()
    found, tensors = [], dense()
    torch.func.vmap(lambda x: found.append(trial_of(tensors).obstacle()) or x)(torch.ones(2))
    assert "torch.func" in found[0]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert "torch.compile" in trial_of(dense()).obstacle()


def test_nothing_is_measured_while_a_graph_is_captured(monkeypatch, tmp_path, caplog):
    """The stream of a capture can neither be waited for nor timed."""
    monkeypatch.setenv("HAL_ATTN_AUTOTUNE", "on")
    monkeypatch.setenv("HAL_ATTN_CACHE_DIR", str(tmp_path / "cache"))
    pair = BatchedFake("one"), BatchedFake("two")
    on_the_cpu(monkeypatch, *pair)
    module = SimpleNamespace(is_current_stream_capturing=lambda: True)
    with monkeypatch.context() as patch:
        patch.setattr(measuring, "_module", lambda device: module)
        attention(*dense())
    assert [len(backend.calls) for backend in pair] == [1, 0]
    assert "nothing is measured" in caplog.text
    assert "a graph is being captured" in caplog.text
    assert not (tmp_path / "cache").exists()


# Events of a device


def test_what_the_caller_queued_is_waited_for_on_its_device(monkeypatch):
    told = []
    event = SimpleNamespace(record=lambda: told.append("record"), synchronize=lambda: told.append("wait"))
    module = SimpleNamespace(device=lambda device: told.append(device) or nullcontext(), Event=lambda: event)
    monkeypatch.setattr(measuring, "_module", lambda device: module)
    trial_of(dense()).wait()
    assert told == [torch.device("cpu"), "record", "wait"]


def test_events_time_the_calls_that_count_and_not_the_one_before():
    told = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            told.append("record")

        def synchronize(self):
            told.append("wait")

        def elapsed_time(self, end):
            told.append("read")
            return 3.0

    assert measuring._time_on_device(Event, lambda: told.append("call"), 2) == 3.0
    assert told == ["call", "record", "call", "call", "record", "wait", "read"]
