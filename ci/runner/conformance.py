"""`hal-attn verify`: every backend of the platform in all that it claims, on the device or over the simulation."""

from __future__ import annotations

from runner import junit, process
from runner.detection import chosen, installed_backends
from runner.environment import Environment
from runner.options import Options
from runner.platforms import ROOT
from runner.result import Result, Status

FILES = {"--junit": "conformance.junit.xml", "--json": "conformance.json", "--html": "conformance.html"}


def check(options: Options, environment: Environment) -> Result:
    """Fail where a backend is wrong, or, on a real device, where not all of it ran there."""
    command = [str(environment.python), "-m", "hal_attn.cli", "verify", "--platform", options.platform.name]
    command += ["--full" if options.full else "--quick"]
    if not options.simulation and options.platform.device_files:
        command += ["--require-hardware", *(f"--backend={name}" for name in installed_backends(options))]
    for flag, name in FILES.items():
        command += [flag, str(options.out / name)]
    log = options.log_folder / "conformance.log"
    # Many small calls: on a busy machine threads that wait for one another take ten times as long.
    variables = {"OMP_NUM_THREADS": "1", **chosen(options, environment)}
    done = process.run(command, log, variables=variables, folder=ROOT, timeout_minutes=options.timeout_minutes)
    files = tuple(name for name in FILES.values() if (options.out / name).exists())
    counts = junit.counts(options.out / FILES["--junit"])
    said = ", ".join(f"{counts[key]} {key}" for key in junit.KEYS) if counts else "no report"
    if done.ok and len(files) == len(FILES) and counts.get("tests"):
        status = Status.SIMULATED if options.simulation else Status.PASSED
        return Result("conformance", status, said, "", done.seconds, files, counts)
    reason = f"{said}; hal-attn verify: {done.ending}, {done.verdict}"
    return Result("conformance", Status.FAILED, reason, f"read {log}", done.seconds, files, counts)
