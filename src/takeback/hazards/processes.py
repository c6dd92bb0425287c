"""Two processes: the op under DistributedDataParallel, its gradients the mean of the ranks'."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import pickle
import queue
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from takeback.hazards.judging import GuardMaker, Hazard, HazardKind, compare, first_line
from takeback.hazards.trial import OpUnderTest, Outcome, Trial, Verdict

kind = HazardKind("processes")


class _Net(nn.Module):
    """The op between parameters of its own, with a shared gradient."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.op = trial.module()
        self.scales = nn.ParameterList(1 + 0.1 * trial.draw(f"s{i}", s) for i, s in enumerate(trial.subject.shapes))
        self.other = nn.Parameter(trial.draw("other", trial.output_shape))

    def forward(self, *x: Tensor) -> Tensor:
        skip = self.other.sin()
        return skip + self.op(*(each * s for each, s in zip(x, self.scales, strict=True)))


def _ddp_rank(rank: int, world: int, subjects: list[OpUnderTest], device: str, store: str, results: Any) -> None:
    """Each rank compares its gradients under DDP with the mean over ranks of the plain net's."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    where = torch.device(device)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
    warnings.simplefilter("ignore")
    for subject in subjects:
        try:
            outcome = _ddp_compare(subject, where, rank, world)
        except Exception as error:
            outcome = Outcome(Verdict.RAISED, first_line(error))
        results.put((rank, subject.name, outcome))
    dist.destroy_process_group()


def _ddp_compare(subject: OpUnderTest, device: torch.device, rank: int, world: int) -> Outcome:
    def batch(trial: Trial, which: int, step: int) -> list[Tensor]:
        return [trial.draw(f"{which} {step} {i}", s) for i, s in enumerate(subject.shapes)]

    steps = range(2)
    expected: dict[str, Tensor | None] = {}
    for which in range(world):
        trial = Trial(subject, device, plain=True)
        net = _Net(trial)
        for step in steps:
            trial.loss(net(*batch(trial, which, step))).backward()
        for i, parameter in enumerate(net.parameters()):
            assert parameter.grad is not None
            share = parameter.grad / world
            before = expected.get(f"gradient {i}")
            expected[f"gradient {i}"] = share if before is None else before + share
    for as_view in (False, True):
        plain, ours = Trial(subject, device, plain=True), Trial(subject, device, plain=False)
        plain.seen = dict(expected)
        net = _Net(ours)
        wrapped = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=as_view, bucket_cap_mb=1e-4)
        for step in steps:
            ours.loss(wrapped(*batch(ours, rank, step))).backward()
        for i, parameter in enumerate(net.parameters()):
            ours.see(f"gradient {i}", parameter.grad)
        outcome = compare(plain, ours)
        if outcome.verdict is not Verdict.RIGHT:
            return outcome
    return Outcome(Verdict.RIGHT)


def run_ddp(
    subjects: list[OpUnderTest], device: str | torch.device = "cpu", limit_s: float = 120
) -> dict[str, Outcome]:
    """Two processes over gloo, all subjects in turn: gradients must be the mean of the ranks'. By subject's name."""
    try:
        pickle.dumps(subjects)
    except Exception as error:
        return {each.name: Outcome(Verdict.SKIPPED, f"cannot be pickled: {first_line(error)}") for each in subjects}
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    said: dict[tuple[int, str], Outcome] = {}
    with tempfile.TemporaryDirectory() as folder:
        args = (2, subjects, str(device), str(Path(folder) / "store"), results)
        ranks = [context.Process(target=_ddp_rank, args=(rank, *args), daemon=True) for rank in range(2)]
        for process in ranks:
            process.start()
        end = datetime.datetime.now() + datetime.timedelta(seconds=limit_s)
        while len(said) < 2 * len(subjects) and datetime.datetime.now() < end:
            try:
                rank, name, outcome = results.get(timeout=0.5)
            except queue.Empty:
                if not any(process.is_alive() for process in ranks):
                    break
            else:
                said[rank, name] = outcome
        for process in ranks:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
    gone = Outcome(Verdict.RAISED, "the process ended without a result")
    order = [Verdict.RIGHT, Verdict.SKIPPED, Verdict.RAISED, Verdict.WRONG]
    return {
        each.name: max((said.get((r, each.name), gone) for r in range(2)), key=lambda o: order.index(o.verdict))
        for each in subjects
    }


def _judge_ddp(subject: OpUnderTest, device: torch.device, guard: GuardMaker) -> Outcome:
    if guard is not contextlib.nullcontext:
        return Outcome(Verdict.SKIPPED, "the guard watches one process")
    return run_ddp([subject], device)[subject.name]


kind.hazards.append(Hazard("DistributedDataParallel", _judge_ddp, slow=True))
