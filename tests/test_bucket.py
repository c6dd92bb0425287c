"""`takeback.bucket`: the chosen lengths are the best there are, every item comes once, shapes are those announced, and
nothing is padded with a guess."""

from __future__ import annotations

import collections
import itertools
import pickle
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

import takeback as tb
from takeback.bucket import BatchSampler, choose_lengths, lengths_of, loader, pad
from takeback.errors import OptionError

lengths_lists = st.lists(st.integers(0, 30), min_size=1, max_size=40)


def draw_lengths(items: int, seed: int = 0) -> list[int]:
    g = np.random.default_rng(seed)
    return np.clip(g.lognormal(3.0, 0.6, items).astype(int), 1, 100).tolist()


# -- which lengths -------------------------------------------------------------------------------------------------


def tokens(lengths: list[int], to: tuple[int, ...]) -> int:
    return sum(min(t for t in to if t >= length) for length in lengths)


@settings(deadline=None, max_examples=150)
@given(lengths_lists, st.integers(1, 4), st.sampled_from([1, 4]))
def test_no_other_lengths_need_fewer_tokens(lengths: list[int], count: int, multiple_of: int) -> None:
    chosen = choose_lengths(lengths, count, multiple_of=multiple_of)
    rounded = [-(-length // multiple_of) * multiple_of for length in lengths]
    assert chosen[-1] == max(rounded)
    assert list(chosen) == sorted(set(chosen))
    assert len(chosen) <= count
    below = sorted(set(rounded) - {max(rounded)})
    others = itertools.combinations(below, min(count, len(below) + 1) - 1)
    assert tokens(rounded, chosen) == min(tokens(rounded, (*other, max(rounded))) for other in others)


def test_many_different_lengths_are_chosen_from_in_little_time() -> None:
    chosen = choose_lengths(range(1, 20_001), 4)
    assert all(abs(length - 5_000 * (i + 1)) < 20 for i, length in enumerate(chosen))


def test_lengths_may_be_a_tensor_or_an_array() -> None:
    assert choose_lengths(torch.tensor([3, 9, 9]), 1) == choose_lengths(np.array([3, 9, 9]), 1) == (9,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 2), "lengths is empty"),
        (([3, -1], 2), "got -1 for item 1"),
        (([3, 2.5], 2), "got 2.5 for item 1"),
        (([3], 0), "count must be a whole number of at least 1, got 0"),
        (([3], True), "count must be"),
    ],
)
def test_choose_lengths_says_what_is_wrong(arguments: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        choose_lengths(*arguments)


def test_lengths_are_measured_of_dicts_tuples_tensors_and_lists() -> None:
    three = torch.ones(3)
    items = [{"input_ids": [1, 2, 3]}, (three, 1), [three, torch.ones(5)], three, [1, 2, 3], np.ones(3)]
    assert lengths_of(items) == [3] * 6
    assert lengths_of([(three, torch.ones(5))], key=1) == [5]
    with pytest.raises(OptionError, match=r"item 0 has no 'input_ids', but \['text'\]: say key="):
        lengths_of([{"text": "a"}])
    with pytest.raises(OptionError, match=r"item 0 has no length \(a int\)"):
        lengths_of([(3, three)])


# -- batches -------------------------------------------------------------------------------------------------------


def shape_of(batch: list[int], lengths: list[int], to: tuple[int, ...]) -> tuple[int, int]:
    longest = max(lengths[i] for i in batch)
    return len(batch), min(t for t in to if t >= longest)


@settings(deadline=None, max_examples=100)
@given(lengths_lists, st.integers(1, 7), st.integers(1, 4), st.booleans(), st.integers(0, 3))
def test_every_item_comes_once_and_every_shape_was_announced(
    lengths: list[int], batch_size: int, count: int, shuffle: bool, epoch: int
) -> None:
    sampler = BatchSampler(lengths, batch_size, count=count, shuffle=shuffle)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert {shape_of(b, lengths, sampler.to) for b in batches} <= set(sampler.shapes)
    assert len(sampler.shapes) <= count + 1
    assert all(len(b) == batch_size for b in batches[:-1]), "only the last batch may be small"


@settings(deadline=None, max_examples=60)
@given(lengths_lists, st.integers(1, 7), st.booleans())
def test_drop_last_leaves_out_what_does_not_fill_a_batch_and_nothing_else(
    lengths: list[int], batch_size: int, shuffle: bool
) -> None:
    if len(lengths) < batch_size:
        with pytest.raises(OptionError, match="there is no batch"):
            BatchSampler(lengths, batch_size, drop_last=True)
        return
    sampler = BatchSampler(lengths, batch_size, drop_last=True, shuffle=shuffle)
    items = [i for batch in sampler for i in batch]
    assert len(items) == len(set(items)) == len(lengths) // batch_size * batch_size
    assert {shape_of(b, lengths, sampler.to) for b in sampler} <= set(sampler.shapes)
    assert {n for n, _ in sampler.shapes} == {batch_size}


def test_each_item_is_left_out_in_some_epoch_not_only_long_ones() -> None:
    lengths = [1] * 50 + [40] * 13
    sampler = BatchSampler(lengths, 10, count=2, drop_last=True)
    missing = [set(range(63)) - {i for batch in sampler for i in batch} for _ in range(40)]
    assert any(min(left) < 50 for left in missing)
    assert all(len(left) == 3 for left in missing)


def test_a_seed_and_an_epoch_give_the_same_batches_and_another_epoch_others() -> None:
    lengths = draw_lengths(200)
    one, two = (BatchSampler(lengths, 8, seed=3) for _ in range(2))
    first, second = list(one), list(one)
    assert first == list(two)
    assert first != second
    two.set_epoch(1)
    assert second == list(two)
    assert first != list(BatchSampler(lengths, 8, seed=4))
    still = BatchSampler(lengths, 8, shuffle=False)
    assert list(still) == list(still)


def test_batches_of_one_length_do_not_come_in_a_row() -> None:
    lengths = [5] * 400 + [50] * 400
    order = [lengths[batch[0]] for batch in BatchSampler(lengths, 8, count=2)]
    assert sum(a != b for a, b in itertools.pairwise(order)) > 20


def test_a_generator_draws_each_epoch() -> None:
    lengths = draw_lengths(100)
    one = BatchSampler(lengths, 8, generator=torch.Generator().manual_seed(1))
    two = BatchSampler(lengths, 8, generator=torch.Generator().manual_seed(1))
    first = list(one)
    assert first == list(two)
    assert first != list(one)


@settings(deadline=None, max_examples=60)
@given(lengths_lists, st.integers(1, 4), st.integers(2, 4), st.booleans())
def test_processes_share_the_items_and_get_equal_batches(
    lengths: list[int], batch_size: int, world_size: int, drop_last: bool
) -> None:
    if drop_last and len(lengths) < batch_size * world_size:
        return
    ranks = [
        list(BatchSampler(lengths, batch_size, count=3, drop_last=drop_last, rank=r, world_size=world_size))
        for r in range(world_size)
    ]
    assert len({tuple(map(len, batches)) for batches in ranks}) == 1, "another number, or another size"
    seen = collections.Counter(i for batches in ranks for batch in batches for i in batch)
    if drop_last:
        assert sum(seen.values()) == len(seen) == len(lengths) // (batch_size * world_size) * batch_size * world_size
    else:
        assert seen.keys() == set(range(len(lengths)))
        assert sum(seen.values()) - len(seen) < world_size, "more items are repeated than the last batch needs"


def test_processes_get_the_same_length_at_the_same_time() -> None:
    lengths = [5] * 13 + [50] * 27  # 5 short ones are carried, and dealt to both processes
    ranks = [BatchSampler(lengths, 4, to=(5, 50), rank=r, world_size=2, shuffle=False) for r in range(2)]
    shapes = [[shape_of(batch, lengths, rank.to) for batch in rank] for rank in ranks]
    assert shapes[0] == shapes[1] == [(4, 5)] + [(4, 50)] * 4
    some = BatchSampler([5, 5, 50], 2, to=(5, 50), rank=1, world_size=4, shuffle=False)
    assert list(some) == [[1]]
    assert some.shapes == ((1, 50),)


def test_an_epoch_that_nobody_counts_is_warned_about_in_a_group() -> None:
    sampler = BatchSampler(draw_lengths(40), 4, rank=0, world_size=2)
    first = list(sampler)
    with pytest.warns(UserWarning, match=r"epoch 0 is iterated over again, in the same order: call set_epoch"):
        assert list(sampler) == first
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler.set_epoch(1)
        assert list(sampler) != first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"batch_size": 2, "rank": 2, "world_size": 2}, "rank must be below world_size=2, got 2"),
        ({"batch_size": 2, "to": [4]}, "item 1 is 9 long, and the longest length to pad to is 4: truncate it"),
        ({"batch_size": 2, "to": []}, "to= must be one or more lengths"),
        ({"batch_size": 2, "to": [9], "multiple_of": 8}, "multiple_of= is for lengths that are chosen"),
        ({"batch_size": 2, "generator": torch.Generator(), "world_size": 2}, "do not go together"),
    ],
)
def test_batch_sampler_says_what_is_wrong(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        BatchSampler([3, 9, 5], **arguments)


# -- padding -------------------------------------------------------------------------------------------------------


def text(length: int, **more: Any) -> dict[str, Any]:
    return {"input_ids": list(range(1, length + 1)), "attention_mask": [1] * length, **more}


def test_dicts_of_lists_are_padded_by_the_table() -> None:
    batch = pad(to=(4, 8))([text(2, labels=[7, 8], weight=0.5), text(3, labels=[1, 2, 3], weight=1.0)])
    assert batch["input_ids"].tolist() == [[1, 2, 0, 0], [1, 2, 3, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 0]]
    assert batch["labels"].tolist() == [[7, 8, -100, -100], [1, 2, 3, -100]]
    assert batch["weight"].tolist() == [0.5, 1.0]
    assert pad(to=(4, 8))([text(5)])["input_ids"].shape == (1, 8)
    assert pad(to=6)([text(5)])["input_ids"].shape == (1, 6)


def test_values_override_the_table_and_the_side_may_be_left() -> None:
    batch = pad(to=[4], values={"input_ids": 9}, side="left")([text(2)])
    assert batch["input_ids"].tolist() == [[9, 9, 1, 2]]
    assert batch["attention_mask"].tolist() == [[0, 0, 1, 1]]


def test_a_mask_is_made_where_it_is_asked_for() -> None:
    items = [{"input_ids": [5, 6]}, {"input_ids": [7]}]
    made = pad(to=[3], mask="attention_mask")(items)
    assert made["attention_mask"].tolist() == [[1, 1, 0], [1, 0, 0]]
    left = pad(to=[3], mask="attention_mask", side="left")(items)
    assert left["attention_mask"].tolist() == [[0, 1, 1], [0, 0, 1]]


class Pair(NamedTuple):
    frames: torch.Tensor
    label: int


def test_tuples_and_tensors_are_padded_by_position_and_keep_their_kind() -> None:
    frames = [torch.ones(2, 3, dtype=torch.float16), torch.ones(4, 3, dtype=torch.float16)]
    batch = pad(to=[5], values={0: -1.0})([(frames[0], 1), (frames[1], 2)])
    assert isinstance(batch, tuple)
    assert batch[0].shape == (2, 5, 3)
    assert batch[0].dtype is torch.float16
    assert batch[0][0, 2:].eq(-1).all()
    assert batch[1].tolist() == [1, 2]
    named = pad(to=[5], values={0: 0})([Pair(frames[0], 1), Pair(frames[1], 2)])
    assert named.frames.shape == (2, 5, 3)
    alone = pad(to=[5], values=True)([torch.tensor([False])])
    assert alone.tolist() == [[False, True, True, True, True]]
    with_arrays = pad(to=[3], values={0: 0, 1: None})([[np.ones(2), torch.ones(7)]] * 2)
    assert [t.shape for t in with_arrays] == [(2, 3), (2, 7)]


def test_one_length_for_fields_of_different_lengths_where_that_is_said() -> None:
    items = [text(3, labels=[1]), text(2, labels=[1, 2, 3, 4, 5])]
    with pytest.raises(OptionError, match=r"fields have different lengths, .*'labels': 1"):
        pad(to=(4, 8))(items)
    batch = pad(to=(4, 8), values={"labels": -100})(items)
    assert {k: tuple(v.shape) for k, v in batch.items()} == dict.fromkeys(batch, (2, 8))


@pytest.mark.parametrize(
    ("arguments", "items", "message"),
    [
        ({}, [text(2, speaker=[1, 2])], r"pad 'speaker' with, a torch.int64 tensor of 2: say values=\{'speaker': 0\}"),
        ({}, [text(2, labels=[0.5, 0.5])], r"'labels' with, a torch.float32 tensor .*values=\{'labels': None\}"),
        ({}, [text(2, labels=torch.ones(2, 2, dtype=torch.long))], "labels of 1 dimensions and whole numbers"),
        ({}, [{"input_ids": [1]}], "no attention_mask that says so to the model: add mask='attention_mask'"),
        ({}, [torch.ones(2)], "what to pad a torch.float32 tensor of 2 with: say values=0"),
        ({}, [(torch.ones(2), 1)], r"pad 0 with, .* say values=\{0: 0\}"),
        ({}, [text(9)], "the longest item of a batch is 9 long, and the longest length to pad to is 8"),
        ({}, [text(2), {"input_ids": [1]}], "items have different fields"),
        ({}, [text(2, more={"a": torch.ones(2)})], "more fields in its field 'more'"),
        ({}, ["text"], "item 0 is a str"),
        ({}, [], "nothing to collate"),
        ({"values": {"label": 0}}, [text(2)], r"values= names 'label', and the batch has \['input_ids'"),
        ({"values": {"mask": -100}}, [{"mask": torch.ones(2, dtype=torch.uint8)}], "torch.uint8 and cannot hold -100"),
        ({"values": {0: 0.5}}, [(torch.ones(2, dtype=torch.long),)], "torch.int64 and cannot hold 0.5"),
        ({"mask": "input_ids"}, [text(2)], "mask='input_ids' names a field to add"),
        ({"mask": "m", "values": 0}, [torch.ones(2)], "mask='m' names a field to add to a dict"),
    ],
)
def test_padding_that_would_be_a_guess_is_refused(arguments: Any, items: list[Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        pad(to=[8], **arguments)(items)


def test_pad_says_what_is_wrong_when_it_is_made() -> None:
    with pytest.raises(OptionError, match="side must be 'right' or 'left', got 'top'"):
        pad(to=[8], side="top")
    with pytest.raises(OptionError, match="let that make the mask"):
        pad(to=[8], mask="m", collate_fn=list)
    with pytest.raises(OptionError, match="whole and at least 1"):
        pad(to=[0])


# -- around the collators of transformers --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("tokenizer") / "vocab.txt"
    path.write_text("\n".join(["a", "b", "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]))
    return transformers.BertTokenizer(str(path))


def test_collators_of_transformers_are_padded_further(tokenizer: Any) -> None:
    texts = [dict(tokenizer(t)) | {"label": i} for i, t in enumerate(["a b", "a a b b"])]
    plain = transformers.DataCollatorWithPadding(tokenizer)(texts)
    batch = pad(to=[9], collate_fn=transformers.DataCollatorWithPadding(tokenizer))(texts)
    assert isinstance(batch, type(plain))
    assert isinstance(batch, transformers.BatchEncoding)
    assert batch.keys() == plain.keys()
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, 9)
    assert batch["input_ids"][0, -1] == tokenizer.pad_token_id != 0
    assert torch.equal(batch["input_ids"][:, : plain["input_ids"].shape[1]], plain["input_ids"])
    assert torch.equal(batch["labels"], plain["labels"])


def test_token_labels_and_the_left_side_come_from_the_collator(tokenizer: Any) -> None:
    items = [text(2, labels=[0, 1]), text(3, labels=[0, 1, 1])]
    collate = transformers.DataCollatorForTokenClassification(tokenizer)
    batch = pad(to=[5], collate_fn=collate)(items)
    assert batch["labels"].tolist() == [[0, 1, -100, -100, -100], [0, 1, 1, -100, -100]]
    tokenizer.padding_side = "left"
    try:
        batch = pad(to=[5], collate_fn=collate)(items)
    finally:
        tokenizer.padding_side = "right"
    assert batch["labels"].tolist() == [[-100, -100, -100, 0, 1], [-100, -100, 0, 1, 1]]
    assert batch["attention_mask"].tolist() == [[0, 0, 0, 1, 1], [0, 0, 1, 1, 1]]


def test_a_batch_of_ones_own_collate_fn_is_padded_along_dimension_1() -> None:
    def collate(items: list[int]) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
        return torch.ones(len(items), max(items)), torch.ones(len(items)), ["name"]

    padded, flat, names = pad(to=[6], collate_fn=collate, values={0: 0})([2, 4])
    assert padded.tolist() == [[1, 1, 1, 1, 0, 0]] * 2
    assert flat.shape == (2,)
    assert names == ["name"]


# -- whole loaders -------------------------------------------------------------------------------------------------


def test_a_loader_with_workers_gives_the_announced_shapes() -> None:
    lengths = draw_lengths(60)
    data = [text(n, labels=n % 3) for n in lengths]
    in_one_line = loader(data, 8, count=3, num_workers=1)
    shapes = {tuple(batch["input_ids"].shape) for batch in in_one_line}
    sampler = in_one_line.batch_sampler
    assert shapes <= set(sampler.shapes)
    assert {n for _, n in shapes} == set(sampler.to)
    again = BatchSampler(lengths, 8, count=3)
    by_hand = DataLoader(data, batch_sampler=again, collate_fn=pickle.loads(pickle.dumps(pad(to=again.to))))
    assert len(by_hand) == len(in_one_line) == 8
    assert list(pickle.loads(pickle.dumps(again))) == list(again)


def test_loader_says_what_is_wrong() -> None:
    with pytest.raises(OptionError, match="there are 1 lengths for 2 items"):
        loader([text(2), text(3)], 2, lengths=[2])
    with pytest.raises(OptionError, match="sampler= is what loader"):
        loader([text(2)], 1, sampler=[0])


def test_a_step_needs_one_plan_for_each_shape_and_has_eagers_bits() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)

    data = [(torch.randint(1, 9, (n,)), torch.randint(9, (n,))) for n in draw_lengths(16, seed=1)]
    batches = loader(data, 4, count=2, values={0: 0, 1: -100}, drop_last=True)
    losses = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = tb.compile_step(model, loss_fn, optimizer, memory="keep")
        batches.batch_sampler.set_epoch(0)
        found = []
        for x, y in itertools.chain(batches, batches):
            if compiled:
                found.append(step(x, y))
                continue
            optimizer.zero_grad()
            loss = loss_fn(model, x, y)
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        losses.append(torch.stack(found))
        if compiled:
            assert len(step._plans) == len(batches.batch_sampler.shapes) == 2
    assert torch.equal(*losses)
