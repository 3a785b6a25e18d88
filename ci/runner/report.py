"""What a run leaves for a reader: report.json, steps.junit.xml, summary.md and index.html."""

from __future__ import annotations

import html
import json
import os
import platform as machine
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from runner import junit
from runner.options import Options
from runner.result import Result, Status

FORMAT = 1
OWN = ("report.json", "steps.junit.xml", "summary.md", "index.html", "constraints.txt", "environment.json")
PATTERNS = ("*.junit.xml", "bench-*.json", "conformance.*", "doctor.json")


def clear(out: Path) -> None:
    """Make the folder, and remove what an earlier run left in it, but no kept figures."""
    out.mkdir(parents=True, exist_ok=True)
    old = [out / name for name in OWN] + [path for pattern in PATTERNS for path in out.glob(pattern)]
    for path in (*old, *(out / "logs").glob("*.log")):
        path.unlink(missing_ok=True)


def ok(results: Sequence[Result]) -> bool:
    """Whether the run may say that all is well."""
    return bool(results) and all(result.status is not Status.FAILED for result in results)


def write(options: Options, results: Sequence[Result], started: str, *, over: bool = True) -> None:
    """All four, each as a whole; and, once the run is over, the summary to GITHUB_STEP_SUMMARY where that is set.

    A run that is not `over` has not passed, whatever its steps did until then.
    """
    content = {
        "format": FORMAT,
        "name": options.title,
        "platform": options.platform.name,
        "simulation": options.simulation,
        "overrides": list(options.overrides),
        "started": started,
        "machine": f"{machine.system()} {machine.machine()}, {os.cpu_count()} CPU cores",
        "ok": over and ok(results),
        "steps": [{**asdict(result), "status": result.status.value} for result in results],
    }
    with _in_place_of(options.out / "report.json") as file:
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    with _in_place_of(options.out / "steps.junit.xml") as file:
        junit.write(results, f"ci/run {options.title}", file)
    text = markdown(options, results, over=over)
    with _in_place_of(options.out / "summary.md") as file:
        file.write_text(text, encoding="utf-8")
    with _in_place_of(options.out / "index.html") as file:
        file.write_text(page(options, results, over=over), encoding="utf-8")
    if over and (summary := os.environ.get("GITHUB_STEP_SUMMARY")):
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(text)


@contextmanager
def _in_place_of(path: Path) -> Iterator[Path]:
    """A file to write, which then takes the place of `path`: whoever reads that finds a whole one."""
    new = path.with_name(f".{path.name}.new")
    yield new
    new.replace(path)


def verdict(options: Options, results: Sequence[Result], *, over: bool = True) -> str:
    """One sentence: passed or failed, what was simulated, and what was not run."""
    failed = [result.step for result in results if result.status is Status.FAILED]
    not_run = [result.step for result in results if result.status is Status.NOT_RUN]
    said = f"FAILED: {', '.join(failed)}" if failed else "passed"
    said = said if over else f"NOT OVER when this was written; {said} until then"
    said += f"; SIMULATED, no device of {options.platform.name} was used" if options.simulation else ""
    return said + (f"; not run: {', '.join(not_run)}" if not_run else "")


def markdown(options: Options, results: Sequence[Result], *, over: bool = True) -> str:
    """A heading, the verdict, and a row a step."""
    lines = [f"## ci/run {options.title}", "", verdict(options, results, over=over), ""]
    lines += ["| Step | Result | Time | What |", "| --- | --- | --- | --- |"]
    for result in results:
        what = result.summary + (f"<br>remedy: {result.remedy}" if result.remedy else "")
        cell = " ".join(what.replace("|", "\\|").split())
        lines.append(f"| {result.step} | {result.status.value} | {_took(result)} | {cell} |")
    return "\n".join([*lines, ""])


def plain(options: Options, results: Sequence[Result]) -> str:
    """The same for a terminal."""
    width = max((len(result.step) for result in results), default=0)
    lines = ["", f"ci/run {options.title}"]
    for result in results:
        lines.append(f"  {result.step:{width}}  {result.status.value:9}  {_took(result):>7}  {result.summary}")
        if result.remedy:
            lines.append(f"  {'':{width}}  remedy: {result.remedy}")
    return "\n".join([*lines, f"{verdict(options, results)}; report in {options.out}"])


def _took(result: Result) -> str:
    return f"{result.seconds:.0f} s" if result.seconds < 120 else f"{result.seconds / 60:.1f} min"


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
td, th { border-bottom: 1px solid #8885; padding: .4rem; text-align: left }
td { vertical-align: top; white-space: nowrap }
td:last-child { white-space: normal; overflow-wrap: anywhere }
.FAILED { color: #c00; font-weight: bold } .remedy { opacity: .8 }
:root { color-scheme: light dark }
"""


def page(options: Options, results: Sequence[Result], *, over: bool = True) -> str:
    """One page without scripts, with links to what the steps left beside it."""
    rows = []
    for result in results:
        links = " ".join(f'<a href="{html.escape(name)}">{html.escape(name)}</a>' for name in result.files)
        remedy = f'<div class="remedy">remedy: {html.escape(result.remedy)}</div>' if result.remedy else ""
        status = html.escape(result.status.value)
        cells = (result.step, f'<span class="{status}">{status}</span>', _took(result))
        what = f"{html.escape(result.summary)}{remedy}<div>{links}</div>"
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in (*cells, what)) + "</tr>")
    title = html.escape(f"ci/run {options.title}")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style><h1>{title}</h1>'
        f"<p>{html.escape(verdict(options, results, over=over))}</p><table><tr><th>Step<th>Result<th>Time<th>What</tr>"
        + "".join(rows)
        + "</table></html>\n"
    )
