"""The ResNets have the published parameter counts, and working in place changes no bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from takeback.zoo import ResNet, ResNetConfig, case, shape_batches
from takeback.zoo.resnet import RESNET18, RESNET50, SMALL, BasicBlock, loss_fn


@pytest.mark.parametrize(("config", "count"), [(RESNET18, 11_689_512), (RESNET50, 25_557_032)])
def test_parameter_count_is_the_published_one(config: ResNetConfig, count: int) -> None:
    with torch.device("meta"):
        model = ResNet(config)
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize("config", [RESNET18, RESNET50])
def test_stages_halve_the_image_and_double_the_channels(config: ResNetConfig) -> None:
    with torch.device("meta"):
        model, hidden = ResNet(config), torch.empty(2, 3, 224, 224)
        expansion = model.stages[0][0].expansion
        hidden = model.stem(hidden)
        assert hidden.shape == (2, 64, 56, 56)
        for index, stage in enumerate(model.stages):
            hidden = stage(hidden)
            assert hidden.shape == (2, 64 * 2**index * expansion, 56 // 2**index, 56 // 2**index)
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)


def test_inplace_gives_the_same_bits_and_really_overwrites() -> None:
    images, labels = next(shape_batches(4, 32, seed=0))
    plain, inplace = ResNet(SMALL), ResNet(replace(SMALL, inplace=True))
    inplace.load_state_dict(plain.state_dict())
    for model in (plain, inplace):
        loss_fn(model, images, labels).backward()
    for expected, actual in zip(plain.parameters(), inplace.parameters(), strict=True):
        assert torch.equal(expected.grad, actual.grad)
    for model, overwrites in ((plain, False), (inplace, True)):
        block = model.stages[0][1].eval()
        branch = block.branch(torch.ones(1, 32, 8, 8)).detach()
        block.branch.forward = lambda _, branch=branch: branch
        assert (block(torch.ones(1, 32, 8, 8)).data_ptr() == branch.data_ptr()) is overwrites


def test_zero_init_makes_a_block_without_projection_the_identity_on_positive_input() -> None:
    images = torch.rand(2, 32, 8, 8)
    block = ResNet(replace(SMALL, zero_init=True)).stages[0][1]
    assert torch.equal(block(images), images)
    assert not torch.equal(ResNet(SMALL).stages[0][1](images), images)


def test_basic_block_matches_the_plain_formula() -> None:
    block = BasicBlock(4, 6, 2, inplace=False).eval()
    images = torch.randn(2, 4, 8, 8)
    first, _, _, second, _ = block.branch
    inner = torch.conv2d(images, first.weight, stride=2, padding=1) / (1 + 1e-5) ** 0.5
    branch = torch.conv2d(inner.clamp(min=0), second.weight, padding=1) / (1 + 1e-5) ** 0.5
    shortcut = torch.conv2d(images, block.shortcut[0].weight, stride=2) / (1 + 1e-5) ** 0.5
    torch.testing.assert_close(block(images), (branch + shortcut).clamp(min=0))


@pytest.mark.slow
def test_small_resnet_learns_the_shapes() -> None:
    built = case("resnet")
    for _, (images, labels) in zip(range(100), shape_batches(32, 32, seed=1), strict=False):
        built.optimizer.zero_grad()
        built.loss_fn(built.model, images, labels).backward()
        built.optimizer.step()
    built.model.eval()
    images, labels = next(shape_batches(512, 32, seed=2))
    with torch.no_grad():
        accuracy = (built.model(images).argmax(1) == labels).float().mean()
    assert accuracy > 0.4, "chance is 0.1"
