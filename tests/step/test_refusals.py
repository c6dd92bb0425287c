"""Bad input: each raises takeback's own error, names the guilty line or object, says what to do, and nothing is lost.

After every refusal model, optimizer and `.grad` are as they were, and a good step on them gives eager's bits.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from step_twins import Setup, assert_same, eager_step, mlp, sgd, snapshot, xy
from torch import Tensor, nn
from torch._ops import HigherOrderOperator

import takeback as tb
from takeback.errors import CaptureError, OptionError, TakebackError

pytestmark = pytest.mark.usefixtures("one_thread", "short_search")

HERE = r"test_refusals\.py"
Loss = Callable[..., Any]


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 4))


def good_steps_equal_eagers(model: nn.Module, optimizer: torch.optim.Optimizer, step: Any, loss_fn: Loss) -> None:
    """From here on, the compiled step and an eager copy of model and optimizer stay the same."""
    other, other_optimizer = copy.deepcopy((model, optimizer))
    twin = Setup(other, loss_fn, other_optimizer, xy)
    for i in range(3):
        state = torch.get_rng_state()
        expected = eager_step(twin, xy(i))
        torch.set_rng_state(state)
        assert torch.equal(step(*xy(i)), expected)
        assert_same(snapshot(model, optimizer), snapshot(other, other_optimizer), f"after good step {i}")


def refused(bad: Loss, match: str, batch: tuple[Any, ...] | None = None, model: nn.Module | None = None) -> str:
    """The message: `bad` is refused at the first step and after good steps, and nothing is lost either time."""
    model = model or normed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    use_bad = [True]

    def loss_fn(m: nn.Module, *args: Any) -> Any:
        return bad(m, *args) if use_bad[0] else cross_entropy(m, *args)

    step = tb.compile_step(model, loss_fn, optimizer)
    message = ""
    for _ in range(2):
        before = snapshot(model, optimizer)
        use_bad[0] = True
        with pytest.raises(CaptureError, match=match) as error:
            step(*(batch or xy(0)))
        message = str(error.value)
        assert_same(snapshot(model, optimizer), before, "after the refusal")
        assert all(p.grad is None for p in model.parameters())
        assert torch.is_grad_enabled()
        use_bad[0] = False
        good_steps_equal_eagers(model, optimizer, step, cross_entropy)
    return message


@pytest.mark.parametrize("lazy", [lambda: nn.LazyLinear(16), lambda: nn.LazyBatchNorm1d(affine=False)])
def test_lazy_module_is_refused_until_it_has_its_shapes(lazy: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(lazy(), nn.LazyLinear(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = tb.compile_step(model, cross_entropy, optimizer)
    with pytest.raises(CaptureError, match=r"[01]\.weight of a lazy module .* Run the model once"):
        step(*xy(0))
    with torch.no_grad():
        model(xy(0)[0])
    good_steps_equal_eagers(model, optimizer, step, cross_entropy)


def test_integer_indexing_is_not_mistaken_for_a_mask() -> None:
    model = mlp()
    optimizer = sgd(model)

    def loss_fn(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return m(x)[torch.arange(8), y].sum()

    good_steps_equal_eagers(model, optimizer, tb.compile_step(model, loss_fn, optimizer), loss_fn)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_zero_tensors_of_forward_mode_are_refused() -> None:
    def hessian(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        h = m(x)
        return torch.func.hessian(lambda a: (a * a * h.detach()).sum())(h).sum() + F.cross_entropy(h, y)

    refused(hessian, rf"a ZeroTensor.*takes part in the step at .*{HERE}.*Differentiate in reverse mode")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode_without_zero_tensors_is_eagers() -> None:
    def jvp(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        h = m(x)
        value, tangent = torch.func.jvp(lambda a: (a * a).sum(), (h,), (torch.ones_like(h),))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(h, torch.ones_like(h))
            squared = torch.autograd.forward_ad.unpack_dual((dual * dual).sum())
        return F.cross_entropy(h, y) + value + tangent + squared.tangent

    model = normed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    good_steps_equal_eagers(model, optimizer, tb.compile_step(model, jvp, optimizer), jvp)


# -- control flow that no guard can hold ---------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:takeback made:RuntimeWarning")
@pytest.mark.parametrize("max_plans", [1, 2, 8])
def test_branch_on_an_ever_changing_value_is_right_and_then_refused_with_its_line(max_plans: int) -> None:
    def loss_fn(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        h = m(x)
        if h.max().item() > 0.3:
            h = h * 2.0
        return F.cross_entropy(h, y)

    model = normed()
    optimizer = sgd(model)
    step = tb.compile_step(model, loss_fn, optimizer, max_plans=max_plans)
    other, other_optimizer = copy.deepcopy((model, optimizer))
    twin = Setup(other, loss_fn, other_optimizer, xy)
    for i in range(20):
        before, state = snapshot(model, optimizer), torch.get_rng_state()
        expected = eager_step(twin, xy(i))
        torch.set_rng_state(state)
        try:
            loss = step(*xy(i))
        except CaptureError as error:
            assert i >= 1
            assert all(part in str(error) for part in ("test_refusals.py", "torch.where"))  # noqa: PT017
            assert_same(snapshot(model, optimizer), before, "after the refusal")
            return
        assert torch.equal(loss, expected), f"step {i}"
        assert_same(snapshot(model, optimizer), snapshot(other, other_optimizer), f"after step {i}")
    pytest.fail("20 recordings in a row and no CaptureError")


# -- what loss_fn returns and does ---------------------------------------------------------------------------------


def loss_per_row(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def detached_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model, x, y).detach()


def loss_without_graph(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return cross_entropy(model, x, y)


def loss_of_the_batch_alone(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return x.square().mean()


def loss_as_a_number(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return 1.0


def loss_of_none(model: nn.Module, x: Tensor, y: Tensor) -> None:
    model(x)


def loss_in_a_dict(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"loss": cross_entropy(model, x, y)}


def three_values(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, int, int]:
    return cross_entropy(model, x, y), 1, 2


def list_of_two(model: nn.Module, x: Tensor, y: Tensor) -> list[Any]:
    return [cross_entropy(model, x, y), None]


def integer_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x).argmax()


def runs_backward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = cross_entropy(model, x, y)
    loss.backward()
    return loss


def runs_backward_and_detaches(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = cross_entropy(model, x, y)
    loss.backward()
    return loss.detach()


def runs_grad(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = cross_entropy(model, x, y)
    torch.autograd.grad(loss, list(model.parameters()))
    return loss


def returns_backwards_none(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    return cross_entropy(model, x, y).backward()


def complex_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.complex(model(x), model(x)).sum()


BAD_LOSSES = [
    (loss_per_row, r"shape \(8,\).*scalar.*\.mean\(\)"),
    (detached_loss, "needs no gradient.*detached"),
    (loss_without_graph, "needs no gradient.*no_grad"),
    (loss_of_the_batch_alone, "needs no gradient"),
    (loss_as_a_number, "returned a float; it must return the loss"),
    (loss_of_none, "returned a NoneType; it must return the loss"),
    (loss_in_a_dict, r"returned a dict; it must return the loss, or \(loss, aux\)"),
    (three_values, r"returned a tuple; it must return the loss, or \(loss, aux\)"),
    (list_of_two, r"returned a list; it must return the loss, or \(loss, aux\)"),
    (integer_loss, "needs no gradient"),
    (runs_backward, "ran the backward itself.*Return the loss"),
    (runs_backward_and_detaches, "ran the backward itself.*Return the loss"),
    (runs_grad, "ran the backward itself.*Return the loss"),
    (returns_backwards_none, "returned a NoneType|ran the backward itself"),
    (complex_loss, "complex"),
]


@pytest.mark.parametrize(("bad", "match"), BAD_LOSSES, ids=lambda v: getattr(v, "__name__", ""))
def test_bad_loss_is_refused_and_nothing_is_lost(bad: Loss, match: str) -> None:
    refused(bad, match)


@pytest.mark.parametrize("bad", [loss_per_row, detached_loss, loss_in_a_dict, runs_backward], ids=lambda f: f.__name__)
def test_bad_loss_message_names_the_users_function_with_file_and_line(bad: Loss) -> None:
    model = mlp()
    step = tb.compile_step(model, bad, sgd(model))
    with pytest.raises(CaptureError, match=rf"{bad.__name__}.*") as error:
        step(*xy(0))
    assert "test_refusals.py:" in str(error.value)


def test_model_output_object_is_refused_with_the_advice_to_return_its_loss() -> None:
    class ModelOutput(dict[str, Tensor]):
        pass

    refused(lambda m, x, y: ModelOutput(loss=cross_entropy(m, x, y)), r"returned a ModelOutput.*return its \.loss")


def test_loss_with_one_element_and_dimensions_is_as_in_eager() -> None:
    def loss_fn(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(m, x, y).reshape(1, 1)

    model = mlp()
    optimizer = sgd(model)
    good_steps_equal_eagers(model, optimizer, tb.compile_step(model, loss_fn, optimizer), loss_fn)


def test_double_backward_inside_loss_fn_is_right() -> None:
    def loss_fn(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(m(x).tanh(), y)
        (slope,) = torch.autograd.grad(loss, [m[0].weight], create_graph=True)
        return loss + slope.square().sum()

    model = mlp()
    optimizer = sgd(model)
    good_steps_equal_eagers(model, optimizer, tb.compile_step(model, loss_fn, optimizer), loss_fn)


def test_nan_loss_is_allowed_and_the_same_as_eagers() -> None:
    def loss_fn(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (m(x) - x.sum() / 0.0 * 0.0).sum()

    model, other = mlp(), mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    twin = Setup(other, loss_fn, torch.optim.AdamW(other.parameters()), xy)
    step = tb.compile_step(model, loss_fn, optimizer, clip_norm=None)
    for i in range(4):
        expected = eager_step(twin, xy(i))
        got = step(*xy(i))
        assert got.isnan()
        assert expected.isnan()
        assert_same(snapshot(model, optimizer), snapshot(other, twin.optimizer), f"after step {i}")


def test_exception_of_the_user_passes_through_unchanged() -> None:
    def loss_fn(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        raise KeyError("mine")

    model = mlp()
    with pytest.raises(KeyError, match="mine"):
        tb.compile_step(model, loss_fn, sgd(model))(*xy(0))


# -- model, optimizer and batch ------------------------------------------------------------------------------------


def test_model_on_two_devices_is_refused_before_anything_runs() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(CaptureError, match=r"more than one device \(cpu, meta\).*model\.to"):
        tb.compile_step(model, cross_entropy, sgd(model))


def test_buffer_on_another_device_is_refused() -> None:
    model = mlp()
    model.register_buffer("away", torch.zeros(1, device="meta"))
    with pytest.raises(CaptureError, match="more than one device"):
        tb.compile_step(model, cross_entropy, sgd(model))


def test_model_moved_to_another_device_between_steps_is_refused() -> None:
    model = mlp()
    step = tb.compile_step(model, cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    step(*xy(0))
    step(*xy(1))
    model.to("meta")
    with pytest.raises(CaptureError, match=r"the model is on meta|more than one device|not a parameter of the model"):
        step(*xy(2))


def test_batch_on_another_device_is_refused() -> None:
    model = mlp()
    x, y = xy(0)
    with pytest.raises(CaptureError, match="tensor 0 of the batch is on meta"):
        tb.compile_step(model, cross_entropy, sgd(model))(x.to("meta"), y)


def test_optimizer_of_another_model_is_refused_with_advice() -> None:
    with pytest.raises(CaptureError, match=r"parameter 0 of group 0 .*not a parameter of the model.*model\.parameters"):
        tb.compile_step(mlp(), cross_entropy, sgd(mlp()))


def test_foreign_parameter_added_to_the_optimizer_between_steps_is_refused() -> None:
    model = mlp()
    optimizer = sgd(model)
    step = tb.compile_step(model, cross_entropy, optimizer)
    for i in range(3):
        step(*xy(i))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(CaptureError, match=r"group 1 of the optimizer .*is not a parameter of the model"):
        step(*xy(3))
    assert_same(model.state_dict(), before)


@pytest.mark.parametrize("place", ["first", "replay", "nested"])
def test_batch_that_holds_a_parameter_is_refused_by_name(place: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
    optimizer = sgd(model)

    def loss_fn(m: nn.Module, inputs: dict[str, Any]) -> Tensor:
        return m(inputs["x"][0]).square().mean()

    step = tb.compile_step(model, loss_fn, optimizer)
    if place == "replay":
        for i in range(3):
            step({"x": [torch.randn(6, 6).requires_grad_(i > 3)]})
    with pytest.raises(CaptureError, match=r"tensor 0 of the batch is the parameter '0\.weight'"):
        step({"x": [model[0].weight]})


def test_batch_that_holds_a_parameter_is_refused_although_a_plan_for_its_shape_is_there() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
    step = tb.compile_step(model, lambda m, x: m(x).square().mean(), sgd(model))
    try:
        for _ in range(3):
            step(torch.randn(6, 6, requires_grad=True))
    except CaptureError:
        pytest.skip("a batch that needs gradients is refused")
    with pytest.raises(CaptureError, match=r"is the parameter '0.weight'"):
        step(model[0].weight)


class Tagged(torch.Tensor):
    """A subclass as users write them: __torch_function__ wraps every result."""


def test_tensor_subclass_in_the_batch_is_refused() -> None:
    model = mlp()
    x, y = xy(0)
    with pytest.raises(CaptureError, match=r"tensor subclass .*Tagged"):
        tb.compile_step(model, cross_entropy, sgd(model))(x.as_subclass(Tagged), y)


def test_tensor_subclass_given_after_plain_tensors_is_refused() -> None:
    model = mlp()
    step = tb.compile_step(model, cross_entropy, sgd(model))
    for i in range(3):
        step(*xy(i))
    x, y = xy(3)
    with pytest.raises(CaptureError, match=r"tensor subclass .*Tagged"):
        step(x.as_subclass(Tagged), y)


def test_tensor_subclass_in_the_closure_is_refused_with_its_line() -> None:
    tagged = torch.ones(4).as_subclass(Tagged)
    refused(lambda m, x, y: (m(x) * tagged).sum(), rf"tensor subclass .*Tagged.*{HERE}")


def test_tensor_subclass_made_in_the_step_is_refused_with_its_line() -> None:
    from torch.masked import masked_tensor

    def bad(m: nn.Module, x: Tensor, y: Tensor) -> Any:
        return masked_tensor(m(x), x[:, :4] > 0).sum()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **kwargs: None)
        refused(bad, rf"tensor subclass .*MaskedTensor.*{HERE}")


class Looked(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(16, 6, sparse=sparse), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x))


def test_sparse_embedding_gradient_is_refused_with_the_advice_sparse_false() -> None:
    model = Looked(sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = tb.compile_step(model, cross_entropy, optimizer)
    before = snapshot(model, optimizer)
    with pytest.raises(CaptureError, match=r"sparse.*test_refusals\.py.*sparse=False"):
        step(torch.arange(8), torch.arange(8) % 4)
    assert_same(snapshot(model, optimizer), before)


def test_sparse_tensor_in_the_batch_is_refused() -> None:
    model = mlp()
    x, y = xy(0)

    def loss_fn(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.sparse.mm(x, m[0].weight.t())[:, :4], y)

    with pytest.raises(CaptureError, match=r"strided|sparse"):
        tb.compile_step(model, loss_fn, sgd(model))(x.to_sparse(), y)


def test_lbfgs_is_refused_with_the_reason() -> None:
    model = mlp()
    with pytest.raises(CaptureError, match=r"LBFGS evaluates the loss several times.*eager"):
        tb.compile_step(model, cross_entropy, torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize(
    ("model", "loss_fn", "optimizer", "match"),
    [
        (lambda x: x, cross_entropy, None, "model must be a torch.nn.Module, got function"),
        (mlp(), "cross_entropy", None, "loss_fn must be callable .*got str"),
        (mlp(), cross_entropy, None, "optimizer must be a torch.optim.Optimizer, got NoneType"),
        (mlp(), cross_entropy, 0.1, "optimizer must be a torch.optim.Optimizer, got float"),
    ],
)
def test_wrong_kind_of_argument_is_named(model: Any, loss_fn: Any, optimizer: Any, match: str) -> None:
    with pytest.raises(CaptureError, match=match):
        tb.compile_step(model, loss_fn, optimizer)


def test_unhashable_object_in_the_batch_is_refused_by_type() -> None:
    class Odd:
        __hash__ = None  # type: ignore[assignment]

    model = mlp()
    with pytest.raises(CaptureError, match=r"the batch holds a .*Odd, .*Pass its tensors"):
        tb.compile_step(model, cross_entropy, sgd(model))(*xy(0), Odd())


def test_report_before_the_first_step_says_so() -> None:
    model = mlp()
    with pytest.raises(CaptureError, match="run the step once"):
        tb.compile_step(model, cross_entropy, sgd(model)).report()


# -- options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mode": "bogus"}, "mode must be one of 'auto', 'exact', 'fast', got 'bogus'"),
        ({"mode": None}, "mode must be one of"),
        ({"memory": "0x"}, "memory='0x' is no part of eager's peak: it must be more than 0, and finite"),
        ({"memory": "-1GiB"}, "memory must be 'auto', 'min', 'keep', .*got '-1GiB'"),
        ({"memory": "0GiB"}, "a size such as '24GiB', '512MiB' or a number of bytes is needed, got '0GiB'"),
        ({"memory": "bogus"}, "memory.*'bogus'"),
        ({"memory": None}, "memory.*None"),
        ({"memory": ""}, "memory must be 'auto', 'min', 'keep', .*got ''"),
        ({"update": "early", "clip_norm": 1.0}, "clip_norm=1.0 needs the norm of all of them"),
        ({"update": "early", "accumulate": 2}, "accumulate=2 sums them over microbatches first"),
        ({"update": "early", "keep_grads": True}, "keep_grads=True keeps them to the end"),
        ({"update": "soon"}, "update must be one of 'end', 'early', got 'soon'"),
        ({"update": "late"}, "update must be one of 'end', 'early', got 'late'"),
        ({"group": object}, "group must be a process group of torch.distributed, .* got <class"),
        ({"group": True}, "group must be a process group of torch.distributed, .* got True"),
        ({"scaler": 65536.0}, "scaler must be a torch.amp.GradScaler or None, got 65536.0"),
        (
            {"update": "early", "scaler": torch.amp.GradScaler("cpu")},
            "scaler= skips every update if one of them is not",
        ),
        ({"accumulate": 0}, "accumulate must be a whole number of at least 1, got 0"),
        ({"accumulate": -2}, "accumulate must be a whole number"),
        ({"accumulate": True}, "accumulate must be a whole number of at least 1, got True"),
        ({"accumulate": 2.5}, "accumulate must be a whole number of at least 1, got 2.5"),
        ({"accumulate": None}, "accumulate must be a whole number"),
        ({"clip_norm": -1}, "clip_norm must be a positive number or None, got -1"),
        ({"clip_norm": 0}, "clip_norm must be a positive number or None, got 0"),
        ({"clip_norm": float("nan")}, "clip_norm must be a positive number or None, got nan"),
        ({"clip_norm": "1"}, "clip_norm must be a positive number or None, got '1'"),
        ({"clip_norm": True}, "clip_norm must be a positive number or None, got True"),
        ({"verify_every": -1}, "verify_every must be a whole number of at least 0, got -1"),
        ({"verify_every": 1.0}, "verify_every must be a whole number"),
        ({"max_plans": 0}, "max_plans must be a whole number of at least 1, got 0"),
        ({"keep_grads": "yes"}, "keep_grads must be True or False, got 'yes'"),
        ({"poison": 1.5}, "poison must be True or False, got 1.5"),
    ],
    ids=lambda v: str(v).split(" object at")[0],
)
def test_bad_option_is_refused_with_name_value_and_choices(options: dict[str, Any], match: str) -> None:
    model = mlp()
    with pytest.raises(OptionError, match=match) as error:
        tb.compile_step(model, cross_entropy, sgd(model), **options)
    assert isinstance(error.value, TakebackError)
    assert isinstance(error.value, ValueError)


def test_accumulate_that_does_not_divide_tensors_of_other_rows_is_refused_with_both_numbers() -> None:
    model = normed()
    optimizer = sgd(model)

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor, each: Tensor) -> Tensor:
        return cross_entropy(model, x, y) + each.mean()

    step = tb.compile_step(model, loss_fn, optimizer, accumulate=3)
    before = snapshot(model, optimizer)
    with pytest.raises(CaptureError, match=r"accumulate=3 does not divide a batch of 8 rows.*multiple of 3"):
        step(*xy(0), torch.zeros(4))
    assert_same(snapshot(model, optimizer), before)
    step(*xy(0, 9), torch.zeros(3))


# -- hooks ---------------------------------------------------------------------------------------------------------


def forward_hook(model: Any, calls: list[str]) -> Any:
    return model[1].register_forward_hook(lambda *a: calls.append("called"))


def forward_pre_hook(model: Any, calls: list[str]) -> Any:
    return model[1].register_forward_pre_hook(lambda *a: calls.append("called"))


def full_backward_hook(model: Any, calls: list[str]) -> Any:
    return model[0].register_full_backward_hook(lambda *a: calls.append("called"))


def full_backward_pre_hook(model: Any, calls: list[str]) -> Any:
    return model[0].register_full_backward_pre_hook(lambda *a: calls.append("called"))


def tensor_hook(model: Any, calls: list[str]) -> Any:
    return model[0].weight.register_hook(lambda g: calls.append("called"))


def post_accumulate_grad_hook(model: Any, calls: list[str]) -> Any:
    return model[0].weight.register_post_accumulate_grad_hook(lambda p: calls.append("called"))


def global_forward_hook(model: Any, calls: list[str]) -> Any:
    return nn.modules.module.register_module_forward_hook(lambda *a: calls.append("called"))


def global_forward_pre_hook(model: Any, calls: list[str]) -> Any:
    return nn.modules.module.register_module_forward_pre_hook(lambda *a: calls.append("called"))


def global_full_backward_hook(model: Any, calls: list[str]) -> Any:
    return nn.modules.module.register_module_full_backward_hook(lambda *a: calls.append("called"))


HOOKS = [
    full_backward_hook,
    full_backward_pre_hook,
    tensor_hook,
    post_accumulate_grad_hook,
    global_forward_hook,
    global_forward_pre_hook,
    global_full_backward_hook,
]


@pytest.fixture
def remove_after() -> Iterator[list[Any]]:
    handles: list[Any] = []
    yield handles
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("register", [forward_hook, forward_pre_hook], ids=lambda f: f.__name__)
@pytest.mark.parametrize("when", ["before compile", "between steps"])
def test_forward_hook_that_keeps_state_is_refused_and_put_back(
    register: Callable[..., Any], when: str, remove_after: list[Any]
) -> None:
    model = normed()
    optimizer = sgd(model)
    calls: list[str] = []
    step = tb.compile_step(model, cross_entropy, optimizer)
    if when == "between steps":
        for i in range(3):
            step(*xy(i))
    remove_after.append(register(model, calls))
    before = snapshot(model, optimizer)
    with pytest.raises(CaptureError, match=r"keeps state in Python: variable 'calls' of .*_hooks"):
        step(*xy(3))
    assert_same(snapshot(model, optimizer), before, "after the refusal")
    assert calls == []
    remove_after.pop().remove()
    good_steps_equal_eagers(model, optimizer, step, cross_entropy)


@pytest.mark.parametrize("register", HOOKS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("when", ["before compile", "after compile", "between steps"])
def test_hook_is_refused_by_name_and_training_goes_on_once_it_is_removed(
    register: Callable[..., Any], when: str, remove_after: list[Any]
) -> None:
    model = normed()
    optimizer = sgd(model)
    calls: list[str] = []
    if when == "before compile":
        remove_after.append(register(model, calls))
    step = tb.compile_step(model, cross_entropy, optimizer)
    if when == "after compile":
        remove_after.append(register(model, calls))
    if when == "between steps":
        for i in range(3):
            step(*xy(i))
        remove_after.append(register(model, calls))
    before = snapshot(model, optimizer)
    with pytest.raises(CaptureError, match=rf"hook.*<lambda> \(.*{HERE}:\d+\).*dropped.*Remove it"):
        step(*xy(3))
    assert_same(snapshot(model, optimizer), before, "after the refusal")
    remove_after.pop().remove()
    good_steps_equal_eagers(model, optimizer, step, cross_entropy)


def test_hook_on_a_teacher_in_the_closure_is_refused_or_called() -> None:
    teacher, model, calls = mlp(5), mlp(), [0]
    box = {"calls": calls}
    step = tb.compile_step(
        model, lambda m, x, y: F.cross_entropy(m(x), y) + F.mse_loss(m(x), teacher(x).detach()), sgd(model)
    )
    for i in range(3):
        step(*xy(i))

    def hook(*args: Any) -> None:
        box["calls"][0] += 1

    handle = teacher[0].register_forward_hook(hook)
    with pytest.raises(CaptureError, match="hook"):
        step(*xy(3))
    handle.remove()
    step(*xy(4))


class HookCounter:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args: Any) -> None:
        self.calls += 1


@pytest.mark.parametrize("kind", ["register_step_pre_hook", "register_step_post_hook"])
@pytest.mark.parametrize("when", ["before compile", "between steps"])
def test_optimizer_step_hook_is_called_once_per_step(kind: str, when: str) -> None:
    model = mlp()
    optimizer, hook = sgd(model), HookCounter()
    if when == "before compile":
        getattr(optimizer, kind)(hook)
    step = tb.compile_step(model, cross_entropy, optimizer)
    if when == "between steps":
        for i in range(3):
            step(*xy(i))
        getattr(optimizer, kind)(hook)
    for i in range(4):
        step(*xy(i))
    assert hook.calls == 4


@pytest.mark.parametrize("when", ["before compile", "between steps"])
def test_global_optimizer_step_hook_is_called_once_per_step_with_the_users_optimizer(when: str) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    model = mlp()
    optimizer = sgd(model)
    seen: list[object] = []
    step = tb.compile_step(model, cross_entropy, optimizer)
    if when == "between steps":
        for i in range(3):
            step(*xy(i))
    handle = register_optimizer_step_post_hook(lambda o, *a: seen.append(o))
    try:
        for i in range(4):
            step(*xy(i))
    except CaptureError as error:
        assert "hook" in str(error)  # noqa: PT017
    else:
        assert seen == [optimizer] * 4
    finally:
        handle.remove()


def test_lr_scheduler_does_not_warn_that_the_optimizer_was_not_stepped() -> None:
    model = mlp()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    step = tb.compile_step(model, cross_entropy, optimizer)
    for i in range(6):
        step(*xy(i))
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)


def test_hook_on_an_activation_made_in_the_step_that_only_computes_is_right() -> None:
    def loss_fn(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        h = m(x)
        h.register_hook(lambda g: g * 2.0)
        return F.cross_entropy(h, y)

    model = mlp()
    optimizer = sgd(model)
    good_steps_equal_eagers(model, optimizer, tb.compile_step(model, loss_fn, optimizer), loss_fn)


def test_hook_on_an_activation_that_keeps_state_is_refused() -> None:
    norms: list[Tensor] = []

    def bad(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        h = m(x)
        h.register_hook(lambda g: norms.append(g.norm()))
        return F.cross_entropy(h, y)

    refused(bad, "outlives|state in Python")


class Twice(HigherOrderOperator):
    """As torch writes flex_attention, cond and scan."""

    def __init__(self) -> None:
        super().__init__("twice")

    def __call__(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Any:
        return super().__call__(run, x)


twice = Twice()
twice.fallthrough(torch._C.DispatchKey.AutogradCPU)
twice.py_impl(torch._C.DispatchKey.CPU)(lambda run, x: run(run(x)))


def test_an_operator_that_runs_a_function_is_refused() -> None:
    assert twice(torch.sin, torch.zeros(2)).equal(torch.zeros(2))
    refused(
        lambda m, x, y: F.cross_entropy(m(twice(torch.sin, x)), y),
        rf"twice takes part in the step.*{HERE}.*attn_implementation='sdpa'",
    )


@pytest.mark.filterwarnings("ignore")
def test_flex_attention_is_refused() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def bad(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():  # on a CPU it has no backward
            q = x[None, None]
            known = flex_attention(q, q, q)[0, 0]
        return F.cross_entropy(m(known), y)

    refused(bad, "flex_attention takes part in the step.*scaled_dot_product_attention")


def test_cache_that_holds_a_tensor_of_the_step_is_refused_and_without_it_the_step_has_eagers_bits() -> None:
    """As in transformers' Sam3: the keys are tensors that each step makes anew."""

    @functools.lru_cache(maxsize=1)
    def grid(size: Tensor) -> Tensor:
        return torch.arange(4, dtype=torch.float32) / size

    def loss_with(called: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        return lambda model, x, y: cross_entropy(model, x, y) + (model(x) * called(torch.tensor([[4, 4]])[0, 0])).mean()

    model = mlp()
    with pytest.raises(CaptureError, match=r"(?s)outlives it.*functools\.lru_cache.*__wrapped__"):
        tb.compile_step(model, loss_with(grid), sgd(model))(*xy(0))
    twin = copy.deepcopy(model)
    step, optimizer = tb.compile_step(model, loss_with(grid.__wrapped__), sgd(model)), sgd(twin)
    for i in range(3):
        loss = loss_with(grid)(twin, *xy(i))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(step(*xy(i)), loss)


class Momentum(nn.Module):
    """As MoCo's: two encoders, of which one follows the other."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = mlp(), mlp().requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.query(x) - self.key(x)

    def pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        return zip(self.query.parameters(), self.key.parameters(), strict=True)


def momentum_by_other_memory(model: Any, x: Tensor, y: Tensor) -> Tensor:
    for q, k in model.pairs():
        k.data = k.data * 0.9 + q.data * (1 - 0.9)
    return cross_entropy(model, x, y)


def momentum_in_place(model: Any, x: Tensor, y: Tensor) -> Tensor:
    for q, k in model.pairs():
        k.data.copy_(k.data * 0.9 + q.data * (1 - 0.9))
    return cross_entropy(model, x, y)


def momentum(seed: int = 0) -> tuple[Momentum, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Momentum()
    return model, torch.optim.SGD(model.query.parameters(), lr=0.1, momentum=0.9)


def test_parameter_that_is_given_other_memory_is_named_with_the_way_out_which_has_eagers_bits() -> None:
    (model, optimizer), (twin, theirs) = momentum(), momentum()
    before, places = snapshot(model, optimizer), [p.data_ptr() for p in model.parameters()]
    with pytest.raises(CaptureError, match=r"gives the parameter key\.0\.weight other memory.*p\.data\.copy_"):
        tb.compile_step(model, momentum_by_other_memory, optimizer)(*xy(0))
    assert_same(snapshot(model, optimizer), before)
    assert [p.data_ptr() for p in model.parameters()] == places
    step = tb.compile_step(model, momentum_in_place, optimizer)
    for i in range(4):
        eagers = Setup(twin, momentum_by_other_memory, theirs, xy)
        assert torch.equal(step(*xy(i)), eager_step(eagers, xy(i)))
        assert_same(snapshot(model, optimizer), snapshot(twin, theirs))
    assert step._replays == 3


def test_step_that_gives_a_parameter_other_memory_runs_plainly_where_that_is_allowed() -> None:
    """Each average is taken once: what the recording did is taken back before."""
    (model, optimizer), (twin, theirs) = momentum(), momentum()
    step = tb.compile_step(model, momentum_by_other_memory, optimizer, unplanned="eager")
    eagers = Setup(twin, momentum_by_other_memory, theirs, xy)
    with pytest.warns(RuntimeWarning, match="other memory"):
        losses = [step(*xy(0))]
    losses += [step(*xy(i)) for i in range(1, 3)]
    assert all(torch.equal(loss, eager_step(eagers, xy(i))) for i, loss in enumerate(losses))
    assert_same(snapshot(model, optimizer), snapshot(twin, theirs))
    assert step.counts.plain == 3
