"""The containers: clean for the linter, from the vendor's image, and started with the device handed in."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from runner.platforms import PLATFORMS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "ci" / "containers"
TOOLS = Path(sys.executable).parent
BASES = {"cpu": "python:", "cuda": "nvidia/cuda:", "rocm": "rocm/pytorch:", "ascend": "quay.io/ascend/cann:"}
HANDED_IN = {
    "cpu": [],
    "cuda": ["--gpus all"],
    "rocm": ["--device /dev/kfd", "--device /dev/dri"],
    "ascend": [
        *(f"--device /dev/{name}" for name in ("davinci_manager", "devmm_svm", "hisi_hdc", "davinci2", "davinci5")),
        "--volume /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro",
    ],
}


def test_there_is_one_for_each_platform():
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(PLATFORMS)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_linter_is_content(platform):
    command = [TOOLS / "hadolint", "--no-color", FOLDER / platform / "Dockerfile"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("platform", PLATFORMS)
def test_it_is_from_the_vendor_s_image_with_a_tag_and_says_what_was_never_built(platform):
    text = (FOLDER / platform / "Dockerfile").read_text()
    (base,) = re.findall(r"^ARG BASE=(\S+)$", text, re.MULTILINE)
    assert base.startswith(BASES[platform])
    assert base.rpartition(":")[2] not in ("", "latest")
    assert "never built here" in text
    assert f'CMD ["ci/run", "{platform}"]' in text


def test_the_scripts_are_clean_for_the_linter():
    command = [TOOLS / "shellcheck", ROOT / "ci" / "run", ROOT / "ci" / "container", ROOT / ".ci" / "run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def container(tmp_path, *arguments, **variables):
    """`ci/container`, and the commands that it gave to the container engine."""
    engine, calls = tmp_path / "engine", tmp_path / "calls"
    engine.write_text(f'#!/bin/sh\necho "$@" >>{calls}\n')
    engine.chmod(0o755)
    given = {**os.environ, "DOCKER": str(engine), "CACHE": str(tmp_path / "cache"), **variables}
    done = subprocess.run(
        [ROOT / "ci" / "container", *arguments], capture_output=True, text=True, env=given, check=False
    )
    return done, calls.read_text().splitlines() if calls.exists() else []


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_device_is_handed_in_and_ci_run_started(platform, tmp_path):
    done, (build, run) = container(tmp_path, platform, "--full", DEVICES="2 5")
    assert done.returncode == 0, done.stderr
    assert build.startswith(f"build --file {FOLDER / platform / 'Dockerfile'} --build-arg BASE={BASES[platform]}")
    for option in HANDED_IN[platform]:
        assert f" {option} " in run
    others = {option for name, listed in HANDED_IN.items() if name != platform for option in listed}
    assert [option for option in others - set(HANDED_IN[platform]) if f" {option} " in run] == []
    assert f"--volume {ROOT}:/src --workdir /src" in run
    assert f" --user {os.getuid()}:{os.getgid()} " in run
    assert " --env HOME=/tmp --env USER=ci " in run
    assert re.search(rf" hal-attn-ci:{platform}-\S+ ci/run {platform} --environments /cache/{platform}-\S+ ", run)
    assert run.endswith(" --figures /cache/figures --full")


def test_another_base_has_an_image_and_environments_of_its_own(tmp_path):
    _, (build, run) = container(tmp_path, "cuda", BASE="nvidia/cuda:12.8.0-devel-ubuntu24.04")
    assert (
        "BASE=nvidia/cuda:12.8.0-devel-ubuntu24.04 --tag hal-attn-ci:cuda-nvidia-cuda-12-8-0-devel-ubuntu24-04 "
        in build
    )
    assert "--environments /cache/cuda-nvidia-cuda-12-8-0-devel-ubuntu24-04 " in run


@pytest.mark.parametrize("arguments", [(), ("tpu",), ("../cpu",)])
def test_an_unknown_platform_starts_nothing(arguments, tmp_path):
    done, calls = container(tmp_path, *arguments)
    assert (done.returncode, calls) == (2, [])
    assert "need one of: ascend cpu cuda rocm" in done.stderr
