"""The signature data against the vendors' newest packages, so that a release that moves an argument fails here.

Python functions are read from the sources that `ci/vendor_sources.py` unpacks; torch-npu's operators by the meta
kernels of its newest wheel (the schemas of the pinned wheel are compared live in `ascend_contract`); PyTorch's own are
asked of the installed PyTorch.
"""

import ast
import importlib
import inspect

import pytest
import torch
from packaging.version import Version

from tests.vendors import signatures, sources

FETCHED = ("amd-aiter", "fa3-fwd", "flash-attn-4")
# Not compared with a package: flash-attn is published as source alone, whose metadata comes from running its setup.py;
# flash-attn-3 has no wheel there and its version is a commit; flashinfer-python's wheel is 100 MB for one function.
PINNED = ("flash-attn", "flash-attn-3", "flashinfer-python")
META = "torch_npu/op_plugin/meta/_meta_registrations.py"


def of(*packages):
    return [function for function in signatures.functions().values() if function.package in packages]


def names(functions):
    return {"argvalues": functions, "ids": [function.id for function in functions]}


def by_call(signature):
    """Positional parameters in order, the others by name: a meta kernel may list those in any order."""
    parameters = signatures.plain(signature)
    return (
        [parameter for parameter in parameters if parameter[1] != "KEYWORD_ONLY"],
        {name: default for name, kind, default in parameters if kind == "KEYWORD_ONLY"},
    )


def test_every_package_is_compared_or_pinned_with_a_reason():
    packages = {function.package for function in signatures.functions().values()}
    assert packages == {*FETCHED, *PINNED, "torch", "torch-npu"}


@pytest.mark.parametrize("function", **names([function for function in of(*FETCHED) if function.source]))
def test_source_has_this_signature(function):
    version = sources.version(function.package)
    print(f"{function.package} {version}, data of {function.version}")
    assert signatures.plain(sources.signature(function)) == signatures.plain(signatures.signature(function.id)), (
        f"{function.id} of {function.package} {version} differs from the data of {function.version}"
    )
    assert sources.exports(function), f"{function.module} of {function.package} {version} has no {function.name}"


def test_fa3_fwd_calls_its_operator_with_these_parameters():
    """What its own function passes by place, which has the schema of the compiled part in its names."""
    tree = ast.parse((sources.folder("fa3-fwd") / "fa3_fwd_interface.py").read_text(encoding="utf-8"))
    (call,) = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "fa3_fwd_cuda.fwd"
    ]
    others = {"qv": "q_v", "out_": "out", "causal": "is_causal", "rotary_interleaved": "is_rotary_interleaved"}
    given = [others.get(ast.unparse(argument), ast.unparse(argument)) for argument in call.args]
    assert given == list(signatures.signature("torch.ops.fa3_fwd.fwd").parameters)


@pytest.mark.parametrize("function", **names(of("torch-npu")))
def test_meta_kernel_has_these_parameters(function):
    version = sources.version("torch-npu")
    print(f"torch-npu {version}, data of {function.version}")
    meta = sources.meta_signature(sources.folder("torch-npu") / META, function.name)
    assert by_call(meta) == by_call(signatures.signature(function.id)), (
        f"{function.id} of torch-npu {version} differs from the data of {function.version}"
    )


@pytest.mark.parametrize("function", **names(of("torch")))
def test_installed_torch_has_this_signature(function):
    print(f"torch {torch.__version__}, data of {function.version}")
    assert Version(torch.__version__).base_version == function.version, "take the data anew for this PyTorch"
    if function.schema is not None:
        assert str(getattr(torch.ops.aten, function.name).default._schema) == function.schema
    else:
        installed = getattr(importlib.import_module(function.module), function.name)
        assert signatures.plain(inspect.signature(installed)) == signatures.plain(signatures.signature(function.id))


def test_absent_sources_fail_with_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv(sources.VARIABLE, str(tmp_path))
    with pytest.raises(AssertionError, match=r"python3 ci/vendor_sources\.py"):
        sources.folder("amd-aiter")
