"""What is predicted for a GPU by its name is what a recording on that GPU shows."""

from __future__ import annotations

import pytest
import torch

import takeback as tb
from takeback import zoo

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("short_search")


# cuDNN takes 0.5 MiB inside of one of the small ResNet's convolutions, of which the prediction knows nothing.
@pytest.mark.parametrize(("name", "unknown_bytes"), [("mlp", 0), ("gpt", 0), ("resnet", 520 << 10), ("dit", 0)])
def test_predicted_tensors_of_eager_are_those_that_were_recorded(name: str, unknown_bytes: int) -> None:
    case = zoo.case(name)
    said = tb.predict(case.model, case.loss_fn, case.optimizer, *case.batch, device="cuda", gpu="H200", memory="keep")
    step = tb.compile_step(case.model.cuda(), case.loss_fn, case.optimizer, mode="fast", memory="keep")
    batch = [t.cuda() for t in case.batch]
    for _ in range(3):
        step(*batch)
    found = step.report()
    workspaces = said.resident["library workspaces"]
    assert said.resident_bytes - workspaces == found.resident_bytes
    above = said.eager_peak_bytes - said.resident_bytes
    recorded = found.eager_peak_bytes - found.resident_bytes
    assert above == pytest.approx(recorded, rel=0.02, abs=unknown_bytes)
