"""What is predicted for a GPU by its name is what a recording on that GPU shows."""

from __future__ import annotations

import pytest
import torch

import takeback as tb
from takeback import zoo

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("short_search"),
]


@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet", "dit"])
def test_predicted_tensors_of_eager_are_those_that_were_recorded(name: str) -> None:
    case = zoo.case(name)
    said = tb.predict(case.model, case.loss_fn, case.optimizer, *case.batch, device="cuda", gpu="H200", memory="keep")
    model = case.model.cuda()
    optimizer = type(case.optimizer)(model.parameters(), **case.optimizer.defaults)
    step = tb.compile_step(model, case.loss_fn, optimizer, mode="fast", memory="keep")
    batch = [t.cuda() for t in case.batch]
    for _ in range(3):
        step(*batch)
    found = step.report()
    workspaces = said.resident["library workspaces"]
    assert said.resident_bytes - workspaces == found.resident_bytes
    above = said.eager_peak_bytes - said.resident_bytes
    assert above == pytest.approx(found.eager_peak_bytes - found.resident_bytes, rel=0.02)
