"""Faults that were planted in the source, one by one, and the tests of `make test` that catch each.

A fault is a small edit that a tired programmer might make: `old`, which occurs once in `file` (below src/takeback),
becomes `new`. `run_faults.py` plants each in a copy and demands that the tests in `caught_by` fail. So whoever makes
the suite faster can see what is lost: add a fault for what you cut, and keep the tests that catch it quick.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class PlantedFault:
    """One edit, and the node ids of tests that fail because of it. The name begins with the part it is in."""

    name: str
    file: str
    old: str
    new: str
    caught_by: tuple[str, ...]


def problem_of(fault: PlantedFault) -> str | None:
    """Why the fault cannot be planted; None if it can."""
    path = ROOT / "src" / "takeback" / fault.file
    if not path.is_file():
        return f"{fault.name!r}: there is no file {fault.file}. Say where its code went."
    times = path.read_text().count(fault.old)
    if times != 1:
        return f"{fault.name!r}: its text occurs {times} times in {fault.file}, and must occur once: {fault.old!r}"
    return None


FAULTS: tuple[PlantedFault, ...] = (
    PlantedFault(
        "capture: a batch norm's running variance is not known to be written",
        "compiler/capture/op_facts.py",
        "aten.native_batch_norm.default: (3, 4),",
        "aten.native_batch_norm.default: (3,),",
        ("tests/step/test_interrupts.py::test_interrupt_before_any_op_of_forward_or_backward_takes_the_step_back",),
    ),
    PlantedFault(
        "capture: the same tensor twice in a batch is taken for two",
        "compiler/capture/batch.py",
        "return (tensor_key(node), again)",
        "return (tensor_key(node), None)",
        ("tests/step/test_guards.py::test_one_tensor_given_twice_and_then_two_tensors_is_right",),
    ),
    PlantedFault(
        "capture: .numpy() leaves the step unseen",
        "compiler/capture/leaks.py",
        '    _refuse_leaving("Tensor.numpy()")\n',
        "",
        ("tests/step/test_guards.py::test_data_that_leaves_torch_is_held_or_refused[numpy]",),
    ),
    PlantedFault(
        "capture: a random state set back is not replayed",
        "compiler/capture/randomness.py",
        "        self._restores.append((position, restore))\n",
        "",
        ("tests/step/test_guards.py::test_random_state_saved_and_restored_inside_the_step_is_replayed",),
    ),
    PlantedFault(
        "capture: torch.tensor() in the step is not copied from its constant",
        "compiler/capture/recorder.py",
        "self.ops.append(Op(aten.clone.default, (source,), {}, (result,), (), self.phase, False, site))",
        "pass",
        ("tests/step/test_guards.py::test_python_number_made_a_tensor_inside_the_step_follows_its_argument",),
    ),
    PlantedFault(
        "capture: Adam's bias correction forgets the root",
        "compiler/capture/update.py",
        '(1 - g["betas"][1] ** t) ** 0.5, step)',
        '(1 - g["betas"][1] ** t), step)',
        ("tests/capture/test_update.py::test_written_update_is_torchs_own[Adam-settings4-single]",),
    ),
    PlantedFault(
        "passes: functionalize lets later readers read the value from before",
        "compiler/passes/functionalize.py",
        "        current[mutated] = fresh\n",
        "        current.setdefault(fresh, mutated)\n",
        (
            "tests/passes/test_passes.py::test_functionalize_names_the_values_of_in_place_ops_and_overwrite_gives_them_the_same_bytes",
        ),
    ),
    PlantedFault(
        "passes: move takes what is read again later",
        "compiler/passes/move.py",
        "elif alive[source.buffer].end > position + 1:",
        "elif alive[source.buffer].end < position + 1:",
        ("tests/passes/test_passes.py::test_move_drops_a_copy_of_a_dying_value_and_keeps_one_that_is_read_again",),
    ),
    PlantedFault(
        "passes: advance moves an update before a value that Python reads",
        "compiler/passes/advance.py",
        "if isinstance(op.target, Special) or op.expected is not None:",
        "if isinstance(op.target, Special):",
        ("tests/passes/test_advance.py::test_no_update_comes_before_a_value_that_is_read_into_python",),
    ),
    PlantedFault(
        "passes: overwrite takes an operand that is read again later",
        "compiler/passes/overwrite.py",
        "if alive[operand.buffer].end > position + 1:",
        "if alive[operand.buffer].end < position + 1:",
        ("tests/passes/test_passes.py::test_move_drops_a_copy_of_a_dying_value_and_keeps_one_that_is_read_again",),
    ),
    PlantedFault(
        "passes: chunk_loss steps by elements instead of rows",
        "compiler/passes/chunk_loss.py",
        "offset=region.offset + start * region.stride[0])",
        "offset=region.offset + start)",
        ("tests/passes/test_passes.py::test_chunked_cross_entropy_has_eagers_bits[1-False-mean]",),
    ),
    PlantedFault(
        "passes: reduce hands a bucket over before its last slice is complete",
        "compiler/passes/reduce.py",
        "where = max([where, *(complete[m] for m in bucket.members)])",
        "where = max([where, *(complete[m] for m in bucket.members[:1])])",
        (
            "tests/passes/test_reduce.py::test_every_bucket_is_handed_over_once_in_order_when_its_last_slice_is_complete",
        ),
    ),
    PlantedFault(
        "passes: what is written twice is replaced by a rebuilt copy",
        "compiler/passes/choice.py",
        "return draft.kept | written | {",
        "return draft.kept | {",
        ("tests/passes/test_choice.py::test_kept_gradients_and_written_buffers_are_fixed",),
    ),
    PlantedFault(
        "passes: dropout may run again",
        "compiler/passes/rebuildable.py",
        "    return dropout != 0.0",
        "    return False",
        ("tests/passes/test_again.py::test_random_writing_or_empty_op_may_not",),
    ),
    PlantedFault(
        "passes: a repeated block is found from three copies on",
        "compiler/passes/repeats.py",
        "if copies >= 2:",
        "if copies >= 3:",
        ("tests/passes/test_repeats.py::test_hand_made_repetition_is_found[aa-2-2]",),
    ),
    PlantedFault(
        "passes: a causal attention costs a full one",
        "compiler/passes/cost.py",
        "total // 2 if _causal(op) else total",
        "total",
        ("tests/passes/test_cost.py::test_fused_attention_is_two_products_and_five_in_the_backward[True]",),
    ),
    PlantedFault(
        "ownership: what is returned dies with its last reader",
        "compiler/ownership/lifetimes.py",
        "end[buffer] = len(program.ops)",
        "end[buffer] = max(end[buffer], 0)",
        ("tests/test_tiny.py::test_compiled_step_trains_like_eager_with_one_allocation",),
    ),
    PlantedFault(
        "borrow check: one declared overwriting allows all of an op's",
        "compiler/ownership/borrow.py",
        "and (write.value, read.value) not in effect.may_overwrite:",
        "and not effect.may_overwrite:",
        ("tests/ownership/test_borrow.py::test_permission_to_overwrite_one_operand_does_not_cover_another",),
    ),
    PlantedFault(
        "borrow check: what lies behind a write changes hands too",
        "compiler/ownership/borrow.py",
        "owners.append(self._owners[last])",
        "owners.append(owner)",
        ("tests/ownership/test_borrow.py::test_read_reaching_beyond_what_was_written_names_only_the_missing_bytes",),
    ),
    PlantedFault(
        "borrow check: only the first run of a read is looked at",
        "compiler/ownership/borrow.py",
        "            run += 1\n        return None",
        "            break\n        return None",
        ("tests/ownership/test_borrow.py::test_read_after_another_value_was_written_names_both_and_the_writer",),
    ),
    PlantedFault(
        "borrow check: scratch may lie on operands",
        "compiler/ownership/borrow.py",
        "        _check_scratch(effect)\n",
        "",
        ("tests/ownership/test_borrow.py::test_scratch_must_not_touch_what_its_own_op_reads_or_writes",),
    ),
    PlantedFault(
        "plan: a gap starts above the nearest rival, not above all below",
        "compiler/plan/greedy.py",
        "np.maximum.accumulate(rival_tops, out=gap_starts[1:])",
        "gap_starts[1:] = rival_tops",
        ("tests/plan/test_greedy.py::test_random_packs_are_placed_validly_and_no_higher_than_everything_piled_up",),
    ),
    PlantedFault(
        "plan: rivals that end one moment later are not seen",
        "compiler/plan/greedy.py",
        "(placed_end > starts[index])",
        "(placed_end > starts[index] + 1)",
        ("tests/plan/test_greedy.py::test_random_lifetimes_are_placed_validly_between_the_bound_and_the_sum",),
    ),
    PlantedFault(
        "plan: the lower bound forgets the alignment",
        "compiler/plan/problem.py",
        "size_bytes = aligned_bytes(item.size_bytes, problem.alignment_bytes)",
        "size_bytes = item.size_bytes",
        ("tests/plan/test_problem.py::test_lower_bound_rounds_every_size_up_to_the_alignment",),
    ),
    PlantedFault(
        "validator: an item may reach beyond the arena",
        "compiler/plan/validate.py",
        "if offset + item.size_bytes > solution.arena_bytes:",
        "if offset > solution.arena_bytes:",
        ("tests/plan/test_validate.py::test_each_fault_is_named_with_items_lifetimes_and_bytes",),
    ),
    PlantedFault(
        "validator: the neighbour below is not looked at",
        "compiler/plan/validate.py",
        "inside[max(at - 1, 0) : at + 1]",
        "inside[at : at + 1]",
        ("tests/plan/test_validate.py::test_each_fault_is_named_with_items_lifetimes_and_bytes",),
    ),
    PlantedFault(
        "executor: a batch tensor is read from the start of its storage",
        "compiler/run/codegen.py",
        "leaf.as_strided(shape, stride, leaf.storage_offset() + offset)",
        "leaf.as_strided(shape, stride, offset)",
        ("tests/step/test_hazard_graphs.py::test_aliased_or_strided_batch_gives_eagers_bits[shifted-plain]",),
    ),
)
