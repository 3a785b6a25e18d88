"""`hal-attn verify`: exit status, what it says, its files, and several reports merged."""

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hal_attn_cpu.platform import CpuPlatform

from hal_attn.cli import verify as verb
from hal_attn.registry import Registry
from hal_attn.testing import FEATURES, Report
from tests import fakes
from tests.cli.conftest import assert_plain, words
from tests.testing import reports


@pytest.fixture
def kit(monkeypatch):
    """`kit(report)` lets the verb find that report; the calls of the kit are kept."""
    calls = []

    def kit(report):
        def run(platform, backend, *, effort, progress):
            calls.append((platform, backend, effort))
            progress("the next", 0, 1)
            return report

        names = [found.name for found in report.platforms]
        parts = {name: [fakes.FakeBackend(b.name) for b in report.backends if b.platform == name] for name in names}
        registry = fakes.registry_of(*(fakes.FakePlatform(name, *found) for name, found in parts.items()))
        monkeypatch.setattr(verb, "default_registry", lambda: registry)
        monkeypatch.setattr(verb, "run_kit", run)
        return calls

    return kit


def only_simulated():
    return reports.report(
        reports.here("rocm", simulated=True), reports.backend("aiter", platform="rocm", simulated=True)
    )


def test_all_passed_is_exit_status_0(run, kit):
    calls = kit(reports.good())
    result = run("verify")
    assert (result.exit_code, result.stderr) == (0, "")
    assert_plain(result.stdout)
    assert words(result.stdout).endswith("Nothing fails: 68 checks passed; checked: 2 backends.")
    assert "cpu/steady device 33 0 1 1 20 %" in words(result.stdout)
    assert calls == [(None, None, "quick")]


@pytest.mark.parametrize(("flag", "effort"), [("--quick", "quick"), ("--full", "full")])
def test_the_effort_reaches_the_kit(run, kit, flag, effort):
    calls = kit(reports.good())
    assert run("verify", "--platform", "cpu", flag).exit_code == 0
    assert calls == [("cpu", None, effort)]


def test_a_failure_is_said_by_backend_feature_and_rule(run, kit):
    kit(reports.mixed())
    result = run("verify")
    assert result.exit_code == 1
    assert_plain(result.stdout)
    text = words(result.stdout)
    assert "FAILED cpu/shaky, LSE, rule 'LSE': LSE, 3 sequences - the LSE is in base 2" in text
    assert "it looks like log2 instead of log - packed 2 sequences" in text
    assert "rocm was SIMULATED: stand-ins" in text
    assert "absent_kernels of cpu did not run: the library flashy is not installed; install it" in text
    assert text.endswith("Not what was asked for: - cpu/shaky failed 1 check; broken rules: LSE")


def test_many_reasons_are_cut_with_a_count_and_never_a_backend(run, kit):
    failed = [reports.check("b", "LSE", "failed", message=f"reason {n}") for n in range(14)]
    kit(reports.report(reports.here(), reports.backend("b", *failed)))
    text = words(run("verify").stdout)
    assert "- reason 9 " in text
    assert "reason 10" not in text
    assert "4 more reasons of b: see --html or --json" in text
    assert "cpu/b failed 14 checks; broken rules: precision" in text


def test_nothing_that_ran_is_not_passed(run, kit):
    kit(reports.report(reports.away("cuda"), reports.missing("flash_attn_3", "cuda")))
    result = run("verify")
    assert result.exit_code == 1
    assert "- nothing passed, because no backend ran" in words(result.stdout)
    assert "cuda did not run: no device of cuda is here; plug one in" in words(result.stdout)


def test_what_a_platform_itself_passed_is_not_enough(run, kit):
    alone = replace(reports.here(), checks=(reports.check("", "contract"),))
    kit(reports.report(alone, reports.missing("absent_kernels")))
    result = run("verify")
    assert result.exit_code == 1
    assert "- nothing passed, because no backend ran" in words(result.stdout)


@pytest.mark.parametrize(
    ("report", "missing"),
    [
        (only_simulated(), ["rocm was SIMULATED, which shows nothing about a device"]),
        (
            reports.report(reports.here(), reports.away("cuda"), reports.backend("b")),
            ["cuda did not run: no device of cuda is here"],
        ),
        (
            reports.report(reports.here(), reports.backend("b"), reports.missing("c")),
            ["cpu/c did not run: the library flashy is not installed"],
        ),
        (reports.mixed(), ["cuda did not run", "rocm was SIMULATED, which", "cpu/absent_kernels did not run"]),
    ],
)
def test_hardware_that_is_required_must_be_there_and_all_of_it(run, kit, report, missing):
    kit(report)
    asked = run("verify", "--require-hardware")
    assert asked.exit_code == 1
    blamed = words(asked.stdout).split("Not what was asked for:")[1]
    for text in missing:
        assert text in blamed
    if report.ok:
        assert run("verify").exit_code == 0, "what is not required may lack"


def test_hardware_that_is_there_is_enough(run, kit):
    kit(reports.good())
    assert run("verify", "--require-hardware").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (("--platform", "cuda"), "- cuda did not run: no device"),
        (("--backend", "flash_attn_3"), "- cuda/flash_attn_3 did not run: no device"),
        (("--backend", "absent_kernels"), "- cpu/absent_kernels did not run: the library flashy"),
    ],
)
def test_what_is_named_must_run(run, kit, arguments, missing):
    report = reports.report(
        reports.here(), reports.away("cuda"), reports.missing("flash_attn_3", "cuda", "no device"),
        reports.missing("absent_kernels"), reports.backend("b"),
    )  # fmt: skip
    kit(report)
    result = run("verify", *arguments)
    assert result.exit_code == 1
    assert missing in words(result.stdout)
    assert run("verify").exit_code == 0


def test_backends_named_several_times_run_each_once_and_only_their_platforms_count(run, monkeypatch, kit):
    calls = kit(reports.report(reports.here(), reports.away("cuda"), reports.backend("b"), reports.backend("c")))
    whole = verb.run_kit("", "", effort="quick", progress=lambda *_: None)
    calls.clear()

    def one(platform, backend, *, effort, progress):
        calls.append(backend)
        only = tuple(found for found in whole.backends if found.name == backend)
        return Report(machine=whole.machine, effort=effort, platforms=whole.platforms, backends=only, seconds=1.0)

    monkeypatch.setattr(verb, "run_kit", one)
    named = ("--backend", "b", "--backend", "c", "--backend", "b")
    result = run("verify", *named, "--require-hardware", "--json", "-")
    assert (result.exit_code, calls) == (0, ["b", "c"])
    found = Report.from_json(result.stdout)
    assert ([b.name for b in found.backends], [p.name for p in found.platforms]) == (["b", "c"], ["cpu"])


def test_a_broken_plugin_is_named_and_fails(run, kit, monkeypatch):
    away = reports.PlatformReport(name="bad", simulated=False, available=False, reason="broken plugin: OSError: gone")
    kit(reports.report(reports.here(), away, reports.backend("b")))

    def load():
        raise OSError("gone")

    monkeypatch.setattr(verb, "default_registry", lambda: Registry({"bad": load, "cpu": CpuPlatform}))
    result = run("verify")
    assert result.exit_code == 1
    assert "- bad did not run: broken plugin: OSError: gone" in words(result.stdout)
    assert run("verify", "--platform", "cpu").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend", "cpu_flsh"), "--backend: got 'cpu_flsh'; allowed: "),
        (("--backend", "cpu_flsh"), "did you mean cpu_flash?"),
        (("--platform", "cud"), "--platform: got 'cud'; allowed: ascend, cpu, cuda, rocm. did you mean cuda?"),
        (("--platform", "cuda", "--backend", "cpu_math"), "--backend: got 'cpu_math'; allowed: flash_attn_3"),
        (("report.json",), "FILE: got report.json; allowed: files only with --merge"),
        (("--merge",), "FILE: got none; allowed: reports that"),
        (("--merge", "--full", "a.json"), "--merge: got with --platform"),
        (("--merge", "nowhere.json"), "FILE: got nowhere.json (No such file or directory); allowed: reports"),
        (("--html", "nowhere/report.html"), "--html: got nowhere/report.html; allowed: a file in a folder"),
    ],
)
def test_wrong_input_is_named_and_exits_2(run, arguments, message):
    result = run("verify", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in words(result.stderr)


def test_a_name_that_is_far_from_all_gets_no_guess(run):
    result = run("verify", "--platform", "acme")
    assert (result.exit_code, result.stdout) == (2, "")
    assert words(result.stderr).endswith("--platform: got 'acme'; allowed: ascend, cpu, cuda, rocm")


@pytest.mark.parametrize("text", ["[]", "{", '{"format": 99}', '{"machines": [{"label": "a"}]}', '{"format": 1}'])
def test_a_file_that_is_no_report_is_named(run, tmp_path, text):
    file = tmp_path / "odd.json"
    file.write_text(text)
    result = run("verify", "--merge", str(file))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "odd.json" in words(result.stderr).replace(" ", "")


def test_json_goes_there_and_back(run, kit, tmp_path):
    report = reports.mixed()
    kit(report)
    file = tmp_path / "report.json"
    assert run("verify", "--json", str(file)).exit_code == 1
    assert Report.from_json(file.read_text()) == report
    result = run("verify", "--json", "-")
    assert (result.exit_code, result.stderr) == (1, "")
    assert json.loads(result.stdout) == report.to_dict()


def test_junit_has_each_check_and_what_is_missing(run, kit, tmp_path):
    report = reports.mixed()
    kit(report)
    file = tmp_path / "junit.xml"
    assert run("verify", "--require-hardware", "--junit", str(file)).exit_code == 1
    root = ElementTree.parse(file).getroot()
    counts = report.counts
    assert int(root.get("tests")) == len(report.checks) + 4
    assert int(root.get("failures")) == counts["failed"] + 4
    assert int(root.get("skipped")) == counts["not run"] == len(root.findall(".//skipped"))
    assert len(root.findall(".//testcase")) == int(root.get("tests"))
    assert [suite.get("name") for suite in root] == [
        "cpu.shaky",
        "cpu.steady",
        "rocm.aiter (SIMULATED)",
        "rocm.aiter_triton_kernels (SIMULATED)",
        "demand",
    ]
    failure = root.find(".//testcase[@classname='cpu.shaky.LSE']/failure")
    assert failure.get("type") == "LSE"
    assert failure.get("message").startswith("LSE: the LSE is in base 2")
    assert "packed 2 sequences" in failure.text
    assert sum(reports.HOSTILE in (out.text or "") for out in root.iter("system-out")) == 12


def test_junit_survives_what_xml_cannot_hold(run, kit, tmp_path):
    bad = reports.check("b", "LSE", "failed", message="kernel said \x00\x1b[31m\ud800 & left", name="a\x07b")
    kit(reports.report(reports.here(), reports.backend("b", bad)))
    file = tmp_path / "junit.xml"
    assert run("verify", "--junit", str(file)).exit_code == 1
    assert "kernel said" in ElementTree.parse(file).getroot().find(".//failure").text


def test_reports_of_several_machines_merge(run, kit, tmp_path):
    for folder, report in (("a", reports.good()), ("b", reports.mixed())):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "box.json").write_text(report.to_json())
    files = [str(tmp_path / folder / "box.json") for folder in ("a", "b")]
    out, page = tmp_path / "all.json", tmp_path / "all.html"
    result = run("verify", "--merge", *files, "--json", str(out), "--html", str(page))
    assert result.exit_code == 1
    assert_plain(result.stdout)
    text = words(result.stdout)
    assert "cpu/steady window refused on a passed on b" in text
    assert "rocm on b was SIMULATED" in text
    assert "- cpu/shaky on b failed 1 check" in text
    found = json.loads(out.read_text())
    assert [part["label"] for part in found["machines"]] == ["a", "b"]
    assert found["ok"] is False
    assert [(c["backend"], c["feature"]) for c in found["conflicts"]] == [("steady", "window")]
    assert "Where the machines disagree" in page.read_text()
    again = run("verify", "--merge", str(out), files[0], "--json", "-")
    assert [part["label"] for part in json.loads(again.stdout)["machines"]] == ["a", "b", "box"]


@pytest.mark.parametrize(
    ("files", "labels"),
    [
        (["h200.json", "mi300x.json"], ["h200", "mi300x"]),
        (["cuda/conformance.json", "rocm/conformance.json"], ["cuda", "rocm"]),
        (["cuda/conformance.json", "mi300x.json"], ["cuda", "mi300x"]),
        (["a/out/conformance.json", "b/out/conformance.json"], ["out", "out (2)"]),
    ],
)
def test_a_machine_is_called_after_its_file_or_its_folder(run, tmp_path, monkeypatch, files, labels):
    for name in files:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(reports.good().to_json())
    found = json.loads(run("verify", "--merge", *(str(tmp_path / name) for name in files), "--json", "-").stdout)
    assert [part["label"] for part in found["machines"]] == labels
    # The same where a person stands in the folder and gives no folder's name.
    monkeypatch.chdir((tmp_path / files[0]).parent)
    found = json.loads(run("verify", "--merge", (tmp_path / files[0]).name, "--json", "-").stdout)
    assert [part["label"] for part in found["machines"]] == labels[:1]


def test_each_machine_shows_its_libraries_and_a_conflict_those_of_both(run, kit, tmp_path):
    window = reports.check("fast", "window", "refused", platform="cuda")
    one = reports.report(reports.here("cuda", fast="1.0"), reports.backend("fast", platform="cuda"))
    two = reports.report(reports.here("cuda", fast="2.0"), reports.backend("fast", window, platform="cuda"))
    for name, report in (("old", one), ("new", two)):
        (tmp_path / f"{name}.json").write_text(report.to_json())
    page = tmp_path / "all.html"
    result = run("verify", "--merge", str(tmp_path / "old.json"), str(tmp_path / "new.json"), "--html", str(page))
    text = words(result.stdout)
    assert "torch 2.13.0 cuda fast 1.0 effort" in text
    assert "torch 2.13.0 cuda fast 2.0 effort" in text
    assert "cuda/fast window passed on old, fast 1.0 refused on new, fast 2.0" in text
    cards, _, conflicts = page.read_text().partition("Where the machines disagree")
    for part in (cards, conflicts):
        assert part.count("fast 1.0") == part.count("fast 2.0") == 1
    kit(one)
    assert "cuda fast 1.0 effort" in words(run("verify", "--html", str(page)).stdout)
    assert page.read_text().count("fast 1.0") == 1


def test_another_machine_may_show_what_one_lacks(run, kit, tmp_path):
    simulated, real = tmp_path / "simulated.json", tmp_path / "real.json"
    simulated.write_text(only_simulated().to_json())
    real.write_text(reports.report(reports.here("rocm"), reports.backend("aiter", platform="rocm")).to_json())
    assert run("verify", "--merge", str(simulated), "--require-hardware").exit_code == 1
    result = run("verify", "--merge", str(simulated), str(real), "--require-hardware")
    assert result.exit_code == 0
    assert "rocm on simulated was SIMULATED" in words(result.stdout)


def test_the_real_kit_on_the_cpu(spawn, tmp_path):
    page, file = tmp_path / "report.html", tmp_path / "report.json"
    asked = ("--platform", "cpu", "--backend", "cpu_flash", "--quick", "--require-hardware")
    result = spawn("verify", *asked, "--html", str(page), "--json", str(file), OMP_NUM_THREADS="1")
    assert (result.returncode, result.stderr) == (0, "")
    assert_plain(result.stdout)
    report = Report.from_json(file.read_text())
    assert [(b.name, b.simulated, b.available) for b in report.backends] == [("cpu_flash", False, True)]
    assert {check.feature for check in report.backends[0].checks} >= set(FEATURES[:6])
    assert page.read_text().count("<td") == 2 * len(FEATURES)
