"""A warning points at the line that asked, whatever lies between."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint

from hal_attn import attention, backends, explain, platforms, select_backend
from hal_attn.settings import read
from hal_attn.warning import warn
from tests.support import dense


class _Layer(torch.nn.Module):
    def forward(self, *tensors):
        return attention(*tensors)


ASKING = {
    "read": lambda *_: read(),
    "backends": lambda *_: backends(),
    "platforms": lambda *_: platforms(),
    "attention": lambda *tensors: attention(*tensors),
    "explain": lambda *tensors: explain(*tensors),
    "select_backend": lambda *tensors: select_backend(*tensors),
    "a layer": lambda *tensors: _Layer()(*tensors),
}


@pytest.mark.parametrize("name", ASKING)
def test_an_unknown_variable_is_the_fault_of_the_line_that_asks(name, monkeypatch):
    # What was answered before is remembered, and an environment is warned about once: each case is a new one of both.
    tensors = dense(1, 3 + list(ASKING).index(name))
    monkeypatch.setenv("HAL_ATTN_BAKCEND", name)
    with pytest.warns(UserWarning, match="HAL_ATTN_BAKCEND is ignored") as caught:
        ASKING[name](*tensors)
    assert [warning.filename for warning in caught] == [__file__]


def test_pytorch_that_calls_back_is_no_user():
    ours = {"__name__": "hal_attn.somewhere", "warn": warn}
    exec("def call_back():\n    warn('here')", ours)
    with pytest.warns(UserWarning, match="here") as caught:
        torch.utils.checkpoint.checkpoint(ours["call_back"], use_reentrant=False)
    assert [warning.filename for warning in caught] == [__file__]
