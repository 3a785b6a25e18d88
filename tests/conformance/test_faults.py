"""Ten deliberate faults: the kit catches each, and says which rule broke."""

import pytest
from hal_attn_cpu.platform import CpuPlatform

from hal_attn.testing import RULES, check_backend
from tests.conformance.faults import FAULTS, report_of
from tests.conformance.working import Working


@pytest.mark.parametrize("name", FAULTS)
def test_is_caught_and_named(name):
    fault = FAULTS[name]
    failed = [check for check in report_of(name).checks if check.status == "failed"]
    told = [check for check in failed if fault.says in check.message]
    assert told
    assert {check.rule for check in told} == {fault.rule}
    assert all(check.message.endswith(f"; the rule: {RULES[fault.rule]}") for check in told)
    # The first thing that a reader sees is the fault itself.
    assert failed[0].rule == fault.rule, failed[0].message


def test_without_a_fault_nothing_fails():
    report = check_backend(Working(), CpuPlatform(), "cpu")
    assert [check for check in report.checks if check.status == "failed"] == []
    assert report.coverage.only_peers == ()
