"""What importing `hal_attn` costs and touches, and what a forked child can do."""

import pytest

IMPORTED = """
import importlib.metadata, json, sys, torch
before, loaded = set(sys.modules), []
load = importlib.metadata.EntryPoint.load
importlib.metadata.EntryPoint.load = lambda point: loaded.append(point.name) or load(point)
import hal_attn
packages = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(json.dumps([sorted(packages), loaded]))
"""

# Libraries that hal_attn depends on are imported first: what they read is theirs.
ENVIRONMENT_READS = """
import json, os, torch, filelock, platformdirs
reads = []
class Recording(type(os.environ)):
    def __getitem__(self, name):
        reads.append(name)
        return super().__getitem__(name)
    def __iter__(self):
        reads.append("all of it")
        return super().__iter__()
os.environ.__class__ = Recording
os.environ.get("SEEN")
import hal_attn
print(json.dumps([reads, torch.cuda.is_initialized()]))
"""

# The alarm ends a child that hangs. One thread, as the data loader of PyTorch sets it: an OpenMP parallel region never
# ends in a child whose parent ran one before, in PyTorch's own operators as well.
FORK = """
import json, os, signal, types, torch, hal_attn
query = torch.arange(64, dtype=torch.float32).view(1, 4, 2, 8)
def answers():
    output = hal_attn.attention(query, query, query, causal=True)
    return [output.flatten().tolist(), [[p.name, p.available, p.remedy] for p in hal_attn.platforms()]]
{before}
parent = answers() if {used_before} else None
read, write = os.pipe()
child = os.fork()
if child == 0:
    signal.alarm(60)
    if parent:
        torch.set_num_threads(1)
    os.write(write, json.dumps(answers()).encode())
    os._exit(0)
os.close(write)
with os.fdopen(read) as pipe:
    text = pipe.read()
_, status = os.waitpid(child, 0)
assert status == 0
print(json.dumps([json.loads(text), parent or answers()]))
"""

# What a CUDA build of PyTorch answers on a machine with one device, and in a fork after it was used.
USED_DEVICE = """
parent_id = os.getpid()
torch.version.cuda, torch.version.hip = "13.0", None
torch.cuda.device_count = lambda: 1
torch.cuda.device_count.__module__ = "torch.cuda"
torch.cuda.get_device_capability = lambda index: (9, 0)
torch.cuda.get_device_properties = lambda index: types.SimpleNamespace(name="NVIDIA H200", total_memory=1 << 30)
torch.cuda._is_in_bad_fork = lambda: os.getpid() != parent_id
"""


def test_import_brings_nothing_but_this_package(interpreter):
    """So it takes no time beyond importing PyTorch: none of PyTorch's compiler, no Triton, no vendor's library or
    platform package, nothing of the command line; and no entry point is loaded."""
    assert interpreter(IMPORTED) == [["hal_attn"], []]


def test_import_brings_none_of_our_own_parts_that_a_call_does_not_need(interpreter):
    code = (
        "import json, sys, hal_attn; print(json.dumps(sorted(name for name in sys.modules if name[:9] == 'hal_attn.')))"
    )
    parts = {name.split(".")[1] for name in interpreter(code)}
    assert not parts & {"bench", "cli", "demo", "portable", "sequence_parallel", "simulation", "testing"}


def test_import_reads_no_environment_and_initialises_no_device(interpreter):
    reads, initialised = interpreter(ENVIRONMENT_READS)
    assert reads == ["SEEN"]
    assert not initialised


@pytest.mark.parametrize("used_before", [False, True])
def test_forked_child_answers_as_its_parent(interpreter, used_before):
    code = FORK.format(before="", used_before=used_before)
    (output, statuses), (parents_output, parents_statuses) = interpreter(code)
    assert output == pytest.approx(parents_output)
    assert statuses == parents_statuses


def test_forked_child_of_a_process_that_used_a_device_has_the_cpu_alone(interpreter):
    """The device is the parent's alone, with the way to have it in a child too; PyTorch's answers are stood in for."""
    code = FORK.format(before=USED_DEVICE, used_before=True)
    (output, statuses), (parents_output, parents_statuses) = interpreter(code, CUDA_VISIBLE_DEVICES="0")
    assert output == pytest.approx(parents_output)
    child, parent = ({name: rest for name, *rest in found} for found in (statuses, parents_statuses))
    assert parent.pop("cuda") == [True, ""]
    available, remedy = child.pop("cuda")
    assert not available
    assert "'spawn' or 'forkserver'" in remedy
    assert child == parent
