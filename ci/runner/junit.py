"""JUnit files: the counts of one, and one made of the steps."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path

from runner.result import Result, Status

KEYS = ("tests", "failures", "errors", "skipped")


def counts(path: Path) -> dict[str, int]:
    """How many tests ran, failed, broke and were skipped; empty where there is no such file or it is cut short."""
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError):
        return {}
    suites = [root] if root.tag == "testsuite" else root.findall("testsuite")
    return {key: sum(int(suite.get(key, 0)) for suite in suites) for key in KEYS}


def write(results: Iterable[Result], name: str, path: Path) -> None:
    """The steps as one suite: a step is a test."""
    results = list(results)
    suite = ElementTree.Element("testsuite", name=name, tests=str(len(results)))
    suite.set("failures", str(sum(result.status is Status.FAILED for result in results)))
    suite.set("skipped", str(sum(result.status is Status.NOT_RUN for result in results)))
    suite.set("errors", "0")
    for result in results:
        case = ElementTree.SubElement(suite, "testcase", classname="ci", name=result.step)
        case.set("time", f"{result.seconds:.3f}")
        if result.status is Status.FAILED:
            failure = ElementTree.SubElement(case, "failure", message=result.summary)
            failure.text = f"{result.summary}\nremedy: {result.remedy}"
        elif result.status is Status.NOT_RUN:
            ElementTree.SubElement(case, "skipped", message=result.summary)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)
