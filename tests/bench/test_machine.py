"""The facts above every table: they tell the measurement, and not where its user keeps files."""

from __future__ import annotations

import pytest
import torch
import typer

from hal_attn.bench.machine import FILE_OPTIONS, facts
from hal_attn.cli import make_app

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--json /home/me/out/found.json --plot pictures/found.png", "--json found.json --plot found.png"),
        ("--json=/home/me/found.json --compare ../old.json --anyway", "--json=found.json --compare old.json --anyway"),
        ("--shape B=4,S=64,H=32/8,D=128 --json -", "--shape B=4,S=64,H=32/8,D=128 --json -"),
        ("--packed=7,3x2,H=4/2 --device cpu", "--packed=7,3x2,H=4/2 --device cpu"),
    ],
)
def test_the_command_keeps_the_names_of_files_alone(arguments, told, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/home/me/bin/hal-attn", "bench", "kernels", *arguments.split()])
    assert facts(CPU)["command"] == f"hal-attn bench kernels {told}"


def test_every_option_of_bench_that_takes_a_file_is_known():
    bench = typer.main.get_command(make_app()).commands["bench"]
    options = [
        option for verb in bench.commands.values() for option in verb.params if option.param_type_name == "option"
    ]
    taking = {name for option in options for name in option.opts if "FILE" in str(option.metavar)}
    assert taking == set(FILE_OPTIONS)


def test_the_settings_keep_the_name_of_a_folder_alone(monkeypatch, tmp_path):
    assert facts(CPU)["settings"] == "none"
    monkeypatch.setenv("HAL_ATTN_CACHE_DIR", str(tmp_path / "tuned"))
    monkeypatch.setenv("HAL_ATTN_BACKEND", " cpu_flash,cpu_math ")
    monkeypatch.setenv("HAL_ATTN_VALIDATE", "")
    assert facts(CPU)["settings"] == "HAL_ATTN_BACKEND=cpu_flash,cpu_math HAL_ATTN_CACHE_DIR=tuned"
