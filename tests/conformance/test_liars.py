"""Backends whose word does not hold fail, with a message that says what was promised."""

import pytest
from hal_attn_cpu.platform import CpuPlatform

from hal_attn.testing import check_backend
from tests.conformance import liars

# What each is caught by: the feature that is looked at, the rule and a part of the message.
CAUGHT = {
    liars.ClaimsNothing: ("contract", "claims", "it takes no plain call, so nothing that it claims can be exercised"),
    liars.CannotBeAsked: ("contract", "contract", "it cannot be asked what it takes"),
    liars.RaisesWhenAsked: ("contract", "contract", "it cannot be asked what it takes: RuntimeError: ask again later"),
    liars.HasNoHook: ("contract", "contract", "it implements no hook"),
    liars.ClaimsWhatItsHookLacks: ("key padding mask", "claims", "key padding mask is claimed, but every call"),
    liars.RefusesWhatItClaims: ("window", "claims", "window is claimed, but every call with it is refused"),
    liars.RefusesByAnotherName: ("softcap", "refused by name", "by no name of"),
    liars.Raises: ("ALiBi", "contract", "it raised RuntimeError: CUDA error: misaligned address"),
    liars.Exits: ("softcap", "contract", "it raised SystemExit: no licence for softcap"),
    liars.HeadsFirst: ("batched", "contract", "shape (2, 4, 37, 64), right is (2, 37, 4, 64)"),
    liars.LseRowsFirst: ("LSE", "LSE", "shape (2, 37, 4), right is (2, 4, 37)"),
    liars.OutputInFloat32: ("dtype bfloat16", "contract", "output: torch.float32, right is torch.bfloat16"),
    liars.LseInFloat64: ("LSE", "LSE", "LSE: torch.float64, right is torch.float32"),
    liars.ReturnsNone: ("batched", "contract", "output: a NoneType, right is a tensor"),
    liars.NotANumber: ("batched", "precision", "values are not finite: nan at [0, 30, 0, 0]"),
    liars.NotZeroWhereBlind: ("causal, unequal lengths", "blind rows", "a query that sees no key has output"),
    liars.Detached: ("gradient", "gradients", "the output is detached from the inputs that require gradients"),
    liars.GradientWithoutScale: ("gradient", "gradients", "gradient of query: error"),
    liars.ScaleOfPaddedHeadDim: ("head dims", "scale", "the scale is that of a head dim padded to 64"),
    liars.WritesIntoQuery: ("batched", "arguments", "the call changed query in place"),
    liars.NeverTheSame: ("deterministic", "determinism", "two calls with deterministic=True differ"),
    liars.DropsTheOthers: ("dropout", "dropout", "dropout_p is taken for the share to keep"),
    liars.NanReachesRows: ("hidden values", "hidden values", "nan at keys that bool mask hides"),
    liars.ReadsNeighbours: ("neighbours", "packed", "changed rows that may not see them"),
    liars.NanReachesNeighbours: ("neighbours", "packed", "NaN in another sequence changed rows"),
    liars.SplitsOneQuery: ("deterministic", "determinism", "LSE: two calls with deterministic=True differ"),
    liars.OneMetadataForAll: ("metadata", "metadata", "sequences with the total and the longest of those before"),
    liars.ChunksOfAnotherBase: ("ring merge", "merging", "merged from 2 parts"),
    liars.IgnoresStrides: ("strides", "layouts", "output: error"),
}


@pytest.mark.parametrize("liar", CAUGHT, ids=lambda liar: liar.__name__)
def test_is_caught(liar):
    feature, rule, says = CAUGHT[liar]
    report = check_backend(liar(), CpuPlatform(), "cpu", features=[feature])
    failed = [check for check in report.checks if check.status == "failed"]
    told = [check for check in failed if says in check.message and check.rule == rule]
    assert told, [(check.name, check.rule, check.message) for check in failed]
    assert not report.ok


def test_a_gradient_that_is_off_by_a_factor_is_told_the_factor():
    report = check_backend(liars.GradientWithoutScale(), CpuPlatform(), "cpu", features=["gradient"])
    messages = [check.message for check in report.checks if check.name == "plain [float32]: gradients"]
    assert "it is the right one times 8;" in messages[0]


def test_claims_that_are_not_kept_are_no_coverage():
    report = check_backend(liars.RefusesWhatItClaims(), CpuPlatform(), "cpu", features=["contract"])
    assert "window" not in report.coverage.claimed
    assert report.coverage.only_peers == ("window",)
