"""A report as JUnit XML, in the form that CI systems read: one suite a backend, one case a check.

What is refused by name passes, for that is what it should do; what did not run is skipped, with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from hal_attn.testing.matrix import Column
from hal_attn.testing.merge import Merged
from hal_attn.testing.report import Check

# What XML 1.0 cannot hold, escaped or not; a vendor's message may have it.
_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(merged: Merged, problems: Sequence[str] = ()) -> str:
    """The report as XML.

    Args:
        merged: what was found.
        problems: why this is not what was asked for, from `verdict.problems`; each fails in a suite of its own, so that
            a missing device is red in CI too.
    """
    root = ElementTree.Element("testsuites", name="hal-attn verify")
    for column in merged.columns:
        root.append(_suite(column, dict(merged.machines)[column.machine].machine))
    demand = _element("testsuite", name="demand", tests=max(1, len(problems)), failures=len(problems))
    for problem in problems:
        case = _element("testcase", classname="demand", name=problem)
        case.append(_element("failure", message=problem))
        demand.append(case)
    if not problems:
        demand.append(_element("testcase", classname="demand", name="all that was asked for was shown"))
    root.append(demand)
    for name in ("tests", "failures", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    root.set("time", f"{sum(report.seconds for _, report in merged.machines):.3f}")
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _suite(column: Column, machine: Sequence[tuple[str, str]]) -> ElementTree.Element:
    name = ".".join(part for part in (column.machine, column.platform, column.backend) if part)
    statuses = [check.status for check in column.checks]
    suite = _element(
        "testsuite",
        name=f"{name} (SIMULATED)" if column.simulated else name,
        tests=len(statuses),
        failures=statuses.count("failed"),
        errors=0,
        skipped=statuses.count("not run"),
        time=f"{sum(check.seconds for check in column.checks):.3f}",
    )
    properties = _element("properties")
    for key, value in (*machine, ("simulated", "yes" if column.simulated else "no")):
        properties.append(_element("property", name=key, value=value))
    suite.append(properties)
    suite.extend(_case(name, check) for check in column.checks)
    return suite


def _case(suite: str, check: Check) -> ElementTree.Element:
    feature = check.feature.replace(".", " ")
    case = _element("testcase", classname=f"{suite}.{feature}", name=check.name, time=f"{check.seconds:.3f}")
    first, _, _ = check.message.partition("\n")
    if check.status == "failed":
        failure = _element("failure", message=f"{check.rule}: {first}", type=check.rule)
        failure.text = _legal("\n".join(part for part in (check.message, check.request) if part))
        case.append(failure)
    elif check.status == "not run":
        case.append(_element("skipped", message=first))
    elif check.status == "refused":
        out = _element("system-out")
        out.text = _legal(f"refused, as it should be: {check.message}")
        case.append(out)
    return case


def _element(tag: str, **attributes: object) -> ElementTree.Element:
    return ElementTree.Element(tag, {name: _legal(str(value)) for name, value in attributes.items()})


def _legal(text: str) -> str:
    return _ILLEGAL.sub("\N{REPLACEMENT CHARACTER}", text)
