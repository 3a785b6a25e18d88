"""The pinned versions of each platform: they parse, leave nothing out, and agree where platforms share a package."""

import re
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from runner import constraints
from runner.pinned import EXTRAS
from runner.platforms import PLATFORMS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMMON = ROOT / "ci" / "constraints-common.txt"
platforms = pytest.mark.parametrize("platform", PLATFORMS.values(), ids=lambda platform: platform.name)


def requirements(extras):
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in PROJECT["optional-dependencies"][extra])]
    return [Requirement(text) for text in texts]


@platforms
def test_every_line_is_a_pin_that_packaging_reads(platform):
    for name, version in constraints.read(platform.constraints).items():
        requirement = Requirement(f"{name}=={version}")
        assert canonicalize_name(requirement.name) == name
        assert str(Version(version)) == version


@platforms
def test_every_package_that_is_asked_for_is_pinned_to_a_version_that_the_project_allows(platform):
    pins = constraints.read(platform.constraints)
    for requirement in requirements((*EXTRAS, *platform.extras)):
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{platform.constraints.name} has no {name}"
        assert requirement.specifier.contains(pins[name], prereleases=True), f"{name}=={pins[name]}, {requirement}"
    assert set(map(constraints.normal, platform.packages)) <= set(pins)


@platforms
def test_a_platform_s_file_includes_the_common_one_and_pins_none_of_it_otherwise(platform):
    text = platform.constraints.read_text()
    assert "-c constraints-common.txt" in text.splitlines()
    own = {constraints.pin(line)[0] for line in text.splitlines() if re.match(r"[A-Za-z]", line)}
    assert own & set(constraints.read(COMMON)) == set()


@pytest.mark.parametrize("platform", ["cuda", "rocm", "ascend"])
def test_a_vendor_s_file_says_what_was_not_tried_here(platform):
    words = " ".join(PLATFORMS[platform].constraints.read_text().replace("\n#", "").split())
    assert re.search(r"not installed|never installed|has been on an Ascend device", words)


def test_nothing_is_pinned_twice():
    for path in (ROOT / "ci").glob("constraints-*.txt"):
        names = [constraints.pin(line)[0] for line in path.read_text().splitlines() if re.match(r"[A-Za-z]", line)]
        assert len(names) == len(set(names)), path.name


def test_an_override_takes_the_place_of_a_pin_and_adds_what_is_new():
    path = PLATFORMS["cpu"].constraints
    found = constraints.effective(path, ["Torch==2.9.1", "some_thing==1.0"])
    assert found == {**constraints.read(path), "torch": "2.9.1", "some-thing": "1.0"}


def test_the_file_that_pip_gets_has_every_pin_and_no_include(tmp_path):
    pins = constraints.read(PLATFORMS["ascend"].constraints)
    constraints.write(pins, tmp_path / "all.txt")
    assert constraints.read(tmp_path / "all.txt") == pins
    assert "-c" not in (tmp_path / "all.txt").read_text()


def test_a_line_that_pins_nothing_is_named(tmp_path):
    path = tmp_path / "constraints-x.txt"
    path.write_text("# a comment\ntorch==2.9.1  # why\nrich>=13\n")
    with pytest.raises(
        constraints.ConstraintError, match=r"constraints-x.txt line 3: got 'rich>=13', need NAME==VERSION"
    ):
        constraints.read(path)
