"""The file of measured choices: torn, foreign, read-only, shared by processes; and what keeps files apart."""

import json
import multiprocessing
import os
from dataclasses import replace
from platform import release
from types import SimpleNamespace

import pytest
import torch
from hal_attn_ascend.platform import AscendPlatform
from hal_attn_cpu.platform import CpuPlatform
from hal_attn_cuda.platform import CudaPlatform
from hal_attn_cuda.simulated.platform import SimulatedCuda
from hal_attn_rocm import platform as rocm

from hal_attn.platform import Detection, DeviceInfo
from hal_attn.settings import Settings
from hal_attn.tuning.kept import FORMAT, Kept, all_kept, identity_of
from hal_attn.tuning.record import Record
from tests.fakes import FakePlatform, registry_of

IDENTITY = (("platform", "fake"), ("device", "Fake Ä/1"), ("fake", "1.0"))
ONE = Record((("a", 1.5), ("b", 2.0)), (("c", "it failed: RuntimeError: x"),), 5, "2026-01-01T00:00:00+00:00")


@pytest.fixture
def kept(tmp_path):
    return Kept(tmp_path / "cache", IDENTITY)


def keep(kept, name="one", record=ONE):
    with kept.locked(5) as held:
        assert held
        kept.keep(name, record)


def test_what_was_kept_is_found(kept):
    assert kept.find("one") is None
    keep(kept)
    keep(kept, "two", replace(ONE, milliseconds=(("b", 1.0),)))
    assert kept.find("one") == replace(ONE, origin=str(kept.path))
    assert kept.find("two").milliseconds == (("b", 1.0),)
    assert kept.find("three") is None
    keep(kept, "one", replace(ONE, rounds=9))
    assert kept.find("one").rounds == 9
    assert [path.suffix for path in sorted(kept.folder.iterdir())] == [".json", ".lock"]


def test_the_name_is_for_people_and_for_any_file_system(kept):
    assert kept.path.name == f"fake_Fake---1_{kept.digest}.json"


FOREIGN = {
    "torn": b'{"format": 2, "classes": {"one": {"milliseconds": {"a": 0.',
    "empty": b"",
    "a list": b"[1, 2]",
    "a number": b"3",
    "no classes": json.dumps({"identity": [list(pair) for pair in IDENTITY]}).encode(),
    "classes are a list": json.dumps({"identity": [list(pair) for pair in IDENTITY], "classes": [1]}).encode(),
    "of another device": json.dumps({"identity": [["platform", "other"]], "classes": {"one": ONE.json()}}).encode(),
    "the first format": b'{"one": {"a": 0.0015}}',
    "binary": b"\x80\x81\xff",
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_a_torn_or_foreign_file_is_only_ignored(content, kept, caplog):
    keep(kept)
    kept.path.write_bytes(content)
    assert kept.find("one") is None
    assert kept.find("one") is None
    assert caplog.text.count("are unreadable and will be measured again") == 1
    assert str(kept.path) in caplog.text
    keep(kept)
    assert kept.find("one").milliseconds == ONE.milliseconds


WRONG = {
    "no record": 3,
    "no times": {**ONE.json(), "milliseconds": None},
    "text": {**ONE.json(), "milliseconds": {"a": "soon"}},
    "nested": {**ONE.json(), "milliseconds": {"a": {"p50": 1}}},
    "below 0": {**ONE.json(), "milliseconds": {"a": -1.0}},
    "zero": {**ONE.json(), "milliseconds": {"a": 0.0}},
    "NaN": {**ONE.json(), "milliseconds": {"a": float("nan")}},
    "infinite": {**ONE.json(), "milliseconds": {"a": float("inf")}},
    "true": {**ONE.json(), "milliseconds": {"a": True}},
    "reasons": {**ONE.json(), "left_out": {"a": 1}},
    "rounds": {**ONE.json(), "rounds": "five"},
    "no when": {**ONE.json(), "when": None},
}


@pytest.mark.parametrize("value", WRONG.values(), ids=WRONG)
def test_one_wrong_record_costs_no_other(value, kept, caplog):
    keep(kept)
    content = json.loads(kept.path.read_text())
    content["classes"]["wrong"] = value
    kept.path.write_text(json.dumps(content))
    assert kept.find("wrong") is None
    assert "unreadable record, which will be measured again (wrong)" in caplog.text
    assert kept.find("one").milliseconds == ONE.milliseconds


def test_a_file_that_cannot_be_read(kept, caplog):
    kept.path.mkdir(parents=True)
    assert kept.find("one") is None
    assert "unreadable" in caplog.text


def test_a_folder_that_cannot_be_made(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    kept = Kept(tmp_path / "file" / "cache", IDENTITY)
    assert kept.find("one") is None
    keep(kept)
    assert "could not be kept" in caplog.text


def test_a_folder_that_is_read_only(kept, monkeypatch, caplog):
    """By what the system answers there: for root, whom tests may run as, no folder is read-only."""

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    keep(kept)
    assert "could not be kept" in caplog.text
    assert "Permission denied" in caplog.text


def _write(folder, name, count):
    kept = Kept(folder, IDENTITY)
    for index in range(count):
        keep(kept, f"{name} {index}")


def test_processes_keep_all_that_each_measured(kept):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_write, args=(kept.folder, name, 20)) for name in "ab"]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    content = json.loads(kept.path.read_text())
    assert set(content["classes"]) == {f"{name} {index}" for name in "ab" for index in range(20)}
    assert list(kept.folder.glob("*.tmp")) == []


def test_a_lock_that_another_holds_is_waited_for_only_so_long(kept):
    with kept.locked(5) as held, Kept(kept.folder, IDENTITY).locked(0.05) as other:
        assert (held, other) == (True, False)
    with kept.locked(0.05) as held:
        assert held


# What keeps files apart


def identity(platform, device="cpu", simulate=None):
    return identity_of(platform, torch.device(device), registry_of(platform), Settings(simulate=simulate))


class Device(FakePlatform):
    def __init__(self, *, version="1.0", device="one", driver="5"):
        super().__init__("fake", detects=Detection(True, "here", versions=(("lib", version),)))
        self.device, self.driver = device, driver

    def devices(self):
        return (DeviceInfo("fake:0", self.device),)

    def runtime_versions(self, device):
        if isinstance(self.driver, Exception):
            raise self.driver
        return (("driver", self.driver),)


def test_device_versions_and_driver_keep_files_apart(tmp_path):
    made = [Device(), Device(version="1.1"), Device(device="two"), Device(driver="6"), Device(driver=OSError("gone"))]
    assert len({Kept(tmp_path, identity(platform)).path for platform in made}) == len(made)
    assert Kept(tmp_path, identity(Device())).path == Kept(tmp_path, identity(Device())).path
    assert ("runtime", "unknown: OSError: gone") in identity(made[-1])


def test_simulations_never_meet_a_device_or_each_other(tmp_path):
    specs = ["cuda", "cuda:sm90", "cuda:sm100", "cuda:sm90,fa3=full"]
    made = [identity(SimulatedCuda.parse(spec.partition(":")[2] or None), simulate=spec) for spec in specs]
    assert len({Kept(tmp_path, each).path for each in made}) == len(specs)
    assert all("_simulated_" in Kept(tmp_path, each).path.name for each in made)
    real = Kept(tmp_path, tuple(pair for pair in made[1] if pair[0] != "simulated"))
    assert real.path not in {Kept(tmp_path, each).path for each in made}


def test_the_processor_is_part_of_the_cpu():
    about = dict(identity(CpuPlatform()))
    assert about["torch"] == torch.__version__
    assert about["processor"] == "unknown" or "model name" in about["processor"]


def test_cuda_tells_runtime_cudnn_and_driver(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    about = dict(CudaPlatform().runtime_versions(torch.device("cuda", 0)))
    assert about.keys() == {"CUDA", "cuDNN", "driver"}
    assert (about["CUDA"], about["cuDNN"]) == ("13.0", "91900")


def test_rocm_tells_runtime_and_driver(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(rocm, "DRIVER", tmp_path / "version")
    assert dict(rocm.RocmPlatform().runtime_versions(torch.device("cuda", 0))) == {"ROCm": "7.0", "driver": release()}
    (tmp_path / "version").write_text("6.16.6\n")
    assert dict(rocm.RocmPlatform().runtime_versions(torch.device("cuda", 0)))["driver"] == "6.16.6"


def test_ascend_tells_cann_and_driver(monkeypatch):
    """As torch_npu 2.7 and later answer."""
    versions = {"CANN": "8.3.RC1", "DRIVER": "25.2.0"}
    monkeypatch.setattr(
        torch, "npu", SimpleNamespace(utils=SimpleNamespace(get_cann_version=versions.get)), raising=False
    )
    about = dict(AscendPlatform().runtime_versions(torch.device("cpu")))
    assert about == {"CANN": "8.3.RC1", "driver": "25.2.0"}


def test_all_files_of_a_folder(kept):
    assert all_kept(kept.folder) == []
    keep(kept)
    (kept.folder / "torn.json").write_text("{")
    one, torn = all_kept(kept.folder)
    assert (one.path, one.identity, one.problem) == (kept.path, IDENTITY, "")
    assert one.records["one"].milliseconds == ONE.milliseconds
    assert torn.problem.startswith("unreadable: ")
    assert json.loads(kept.path.read_text())["format"] == FORMAT
