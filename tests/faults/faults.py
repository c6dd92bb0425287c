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
        "capture: -0.0 and 0.0 in a batch share a plan",
        "compiler/capture/batch.py",
        "return (kind, node.hex())",
        "return (kind, node)",
        ("tests/capture/test_batch.py::test_key_tells_values_apart_that_python_calls_equal[-0.0]",),
    ),
    PlantedFault(
        "capture: every microbatch is the first one",
        "compiler/capture/batch.py",
        "return t.narrow(0, index * rows, rows)",
        "return t.narrow(0, 0, rows)",
        ("tests/capture/test_batch.py::test_microbatches_are_the_parts_of_the_batch_in_order",),
    ),
    PlantedFault(
        "capture: a set is compared by its size",
        "compiler/capture/assumptions.py",
        "if members != container:",
        "if len(members) != len(container):",
        ("tests/capture/test_batch.py::test_exchanged_member_of_a_set_is_seen",),
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
        ("tests/passes/test_rebuildable.py::test_random_writing_or_empty_op_may_not",),
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
        "floor = max(floor, top)",
        "floor = top",
        ("tests/plan/test_greedy.py::test_a_gap_starts_above_all_rivals_below_it",),
    ),
    PlantedFault(
        "plan: among many items a gap starts above the nearest rival, not above all below",
        "compiler/plan/greedy.py",
        "np.maximum.accumulate(tops[rivals], out=gap_starts[1:])",
        "gap_starts[1:] = tops[rivals]",
        ("tests/plan/test_greedy.py::test_a_gap_starts_above_all_rivals_below_it",),
    ),
    PlantedFault(
        "plan: rivals that end one moment later are not seen",
        "compiler/plan/greedy.py",
        "if from_ < end and to > start:",
        "if from_ < end and to > start + 1:",
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
        "validator: a pack may be torn in two",
        "compiler/plan/validate.py",
        "if len(bases) > 1:",
        "if len(bases) > 2:",
        ("tests/plan/test_validate.py::test_a_torn_pack_is_named_with_where_the_item_must_be",),
    ),
    PlantedFault(
        "executor: a batch tensor is read from the start of its storage",
        "compiler/run/codegen.py",
        "leaf.as_strided(shape, stride, leaf.storage_offset() + offset)",
        "leaf.as_strided(shape, stride, offset)",
        ("tests/step/test_hazard_graphs.py::test_aliased_or_strided_batch_gives_eagers_bits[shifted-plain]",),
    ),
    PlantedFault(
        "executor: NaN read into Python is another value each time",
        "compiler/run/codegen.py",
        "return now == then or (now != now and then != then)",
        "return now == then",
        ("tests/step/test_guards.py::test_nan_that_is_read_into_python_is_held_like_any_value",),
    ),
    PlantedFault(
        "executor: a result that an op put elsewhere is not copied home",
        "compiler/run/arena_executor.py",
        "        home.copy_(result)\n",
        "",
        ("tests/run/test_without_compiler.py::test_without_the_allocator_losses_and_state_are_eagers[False]",),
    ),
    PlantedFault(
        "executor: what is read into Python is not compared",
        "compiler/run/codegen.py",
        "if not same_value({call}, {held}): raise",
        "if same_value({call}, {held}) is None: raise",
        ("tests/step/test_guards.py::test_item_that_stays_the_same_is_held_and_one_that_changes_is_right_or_refused",),
    ),
    PlantedFault(
        "executor: dead bytes are not poisoned",
        "compiler/run/codegen.py",
        "if end < last and size:",
        "if end > last and size:",
        ("tests/run/test_poison.py::test_dead_bytes_are_filled_after_a_step_with_poison_alone[True]",),
    ),
    PlantedFault(
        "executor: statistics are not put back after an abort",
        "compiler/run/executor.py",
        "torch._foreach_copy_(live, saved)",
        "pass",
        ("tests/step/test_interrupts.py::test_interrupt_before_any_op_of_forward_or_backward_takes_the_step_back",),
    ),
    PlantedFault(
        "executor: random states are not put back when a held value changed",
        "compiler/run/executor.py",
        "        generator.set_state(state)\n",
        "        generator.get_state()\n",
        ("tests/step/test_guards.py::test_held_value_that_changes_after_a_dropout_draws_eagers_numbers[0.5]",),
    ),
    PlantedFault(
        "allocator: an entry may reach beyond the arena",
        "compiler/run/allocator.py",
        "(offsets > arena_bytes - sizes)",
        "(offsets > arena_bytes)",
        ("tests/run/test_allocator.py::test_script_outside_its_arena_is_refused",),
    ),
    PlantedFault(
        "grads: NaN times the padding stays between the slices",
        "grads/buffer.py",
        "if known is None or not math.isfinite(known):",
        "if known is None:",
        ("tests/grads/test_grad_clip.py::test_one_nonfinite_step_does_not_poison_the_next[True-nan]",),
    ),
    PlantedFault(
        "grads: a gradient from outside is forgotten by gather_",
        "grads/slots.py",
        '            self.take_(grad)\n            self.copies, self.reason = 1, ".grad was assigned from outside"',
        '            self.give()\n            self.copies, self.reason = 1, ".grad was assigned from outside"',
        ("tests/grads/test_grad_hooks.py::test_a_gradient_assigned_from_outside_is_taken_in",),
    ),
    PlantedFault(
        "grads: a hook on a parameter is not called",
        "engine.py",
        "    return bool(tensor._backward_hooks)",
        "    return False",
        ("tests/grads/test_grad_hooks.py::test_a_tensor_hook_sees_and_changes_the_gradient",),
    ),
    PlantedFault(
        "grads: a second backward overwrites the bias's gradient",
        "grads/linear.py",
        "    if not added:\n        torch.sum(dy, dims, dtype=out.dtype, out=out)",
        "    if not added or dy.dim() == 2:\n        torch.sum(dy, dims, dtype=out.dtype, out=out)",
        ("tests/grads/test_grad_zero_copy.py::test_gradient_is_eagers_without_a_copy_and_adds_up[linear]",),
    ),
    PlantedFault(
        "grads: the padding row of an embedding gets a gradient",
        "grads/linear.py",
        "        out[padding] = kept",
        "        pass",
        ("tests/grads/test_grad_zero_copy.py::test_gradient_is_eagers_without_a_copy_and_adds_up",),
    ),
    PlantedFault(
        "grads: the flat norm of a bf16 buffer is not taken row by row",
        "grads/buffer.py",
        'if flat.device.type != "cpu" or kind == math.inf:',
        "if flat.dtype is torch.float32 or kind == math.inf:",
        ("tests/grads/test_grad_clip.py::test_norm_of_ten_million_elements_is_accurate[1.0]",),
    ),
    PlantedFault(
        "optim: dampening is left out where momentum is updated one by one",
        "optim/fused.py",
        "alpha=1 - settings.dampening)",
        "alpha=1)",
        ("tests/optim/test_flat_optimizers.py::test_updates_have_the_bits_of_the_fused_optimizer",),
    ),
    PlantedFault(
        "optim: a skipped step is counted",
        "optim/flat.py",
        "by = 1 if found_inf is None else -found_inf.to(part.device)",
        "by = 1 if found_inf is None else 0 * found_inf.to(part.device)",
        ("tests/optim/test_flat_optimizers.py::test_grad_scaler_skips_and_unscales_as_with_torch[Adam]",),
    ),
    PlantedFault(
        "optim: loaded state is not put into the flat tensors",
        "optim/state.py",
        "            view.copy_(value)\n            entries[name] = view",
        "            entries[name] = view",
        ("tests/optim/test_flat_optimizers.py::test_state_dict_goes_both_ways_in_mid_training",),
    ),
    PlantedFault(
        "optim: a replaced state tensor is not noticed",
        "optim/flat.py",
        "            and all(map(is_, map(dict.get, entries, names), values))\n",
        "",
        ("tests/optim/test_flat_optimizers.py::test_state_assigned_by_hand_is_used",),
    ),
    PlantedFault(
        "nn: a view is overwritten",
        "nn/functional.py",
        "    if engine.is_view(x):\n",
        "    if engine.is_view(x) and not x.is_contiguous():\n",
        ("tests/nn/test_abn.py::test_copies_says_why[view-]",),
    ),
    PlantedFault(
        "nn: what is saved through hooks is overwritten",
        "nn/owner.py",
        "    if ctx.hooked:\n        return saved, HOOKED\n",
        "",
        ("tests/nn/test_abn.py::test_copies_says_why[checkpointed-]",),
    ),
    PlantedFault(
        "nn: a kept graph is overwritten",
        "nn/owner.py",
        "    if engine.graph_is_kept():\n        return saved, KEPT\n",
        "",
        ("tests/nn/test_nn_rows.py::test_copies_says_why[layer]",),
    ),
    PlantedFault(
        "nn: the variance over ranks forgets that means differ",
        "nn/sync.py",
        "(variances + (means - together) ** 2)",
        "variances",
        ("tests/nn/test_abn_sync.py::test_two_uneven_ranks_are_one[every_activation]",),
    ),
    PlantedFault(
        "nn: a weight too small beside its bias is inverted",
        "nn/invert.py",
        "return None if self._worst <= limits.ratio else TOO_SMALL",
        "return None",
        ("tests/nn/test_abn.py::test_a_weight_next_to_zero_keeps_the_input_says_so_and_recovers",),
    ),
    PlantedFault(
        "nn: elu is inverted in half precision",
        "nn/invert.py",
        '        if dtype in (torch.float16, torch.bfloat16):\n            return "elu',
        '        if dtype is torch.float16:\n            return "elu',
        ("tests/nn/test_abn.py::test_every_activation_dtype_and_layout_is_float64s_to_rounding_and_overwrites",),
    ),
    PlantedFault(
        "guard: pieces interleaved with one stride never meet",
        "guard/region.py",
        "return apart < self.run_bytes or stride - apart < other.run_bytes",
        "return apart < self.run_bytes",
        ("tests/guard/test_guard_parts.py::test_regions_cover_the_bytes_of_their_tensors[<lambda>5-<lambda>4]",),
    ),
    PlantedFault(
        "guard: an expanded gradient looks like any other",
        "guard/region.py",
        "shared = any(stride == 0 for _, stride in wide)",
        "shared = False",
        ("tests/guard/test_guard_parts.py::test_a_region_knows_elements_that_share_bytes",),
    ),
    PlantedFault(
        "guard: the last bytes are left out of the fingerprint",
        "guard/fingerprint.py",
        "return zlib.crc32(memory.data), int",
        "return zlib.crc32(words.data), int",
        ("tests/guard/test_guard_parts.py::test_a_fingerprint_sees_any_change[cpu]",),
    ),
    PlantedFault(
        "guard: a second backward over a kept graph is no reader",
        "guard/readers.py",
        "            self._later |= set(own)\n",
        "            pass\n",
        ("tests/guard/test_guard_finds.py::test_own_saved_tensor_where_the_graph_is_kept",),
    ),
    PlantedFault(
        "guard: gradients on their way are no readers",
        "guard/judge.py",
        "if waiting is not None and waiting.key == region.key and reader is not known:",
        "if waiting is not None and waiting.key == region.key and reader is known:",
        ("tests/guard/test_guard_finds.py::test_a_gradient_that_waits_at_the_other_branch_of_an_addition",),
    ),
    PlantedFault(
        "parallel: gradients are added up, not averaged",
        "parallel.py",
        "1.0 / self.world",
        "1.0",
        ("tests/parallel/test_grad_buffer_group.py::test_two_ranks[like_ddp]",),
    ),
    PlantedFault(
        "parallel: a frozen parameter looks like a trained one",
        "parallel.py",
        '("" if p.requires_grad else ", frozen")',
        '""',
        ("tests/parallel/test_group.py::test_two_ranks[other_models]",),
    ),
    PlantedFault(
        "parallel: buckets are started from the first tensor on",
        "flat.py",
        "key=lambda bucket: -bucket.members[0]",
        "key=lambda bucket: bucket.members[0]",
        ("tests/test_flat.py::test_every_slice_is_aligned_and_in_exactly_one_bucket",),
    ),
    PlantedFault(
        "parallel: every tensor gets the first one's bytes of rank 0",
        "parallel.py",
        "        start += _size_bytes(t)\n",
        "",
        ("tests/parallel/test_group.py::test_two_ranks[plain]",),
    ),
    PlantedFault(
        "parallel: a gradient that only another rank has is dropped",
        "grads/exchange.py",
        "                if used[slot]:\n                    slot.give()",
        "                if used[slot] and slot.holds():\n                    slot.give()",
        ("tests/parallel/test_grad_buffer_group.py::test_two_ranks[unused]",),
    ),
    PlantedFault(
        "verify: the random state is not taken back",
        "compiler/run/verify.py",
        "            generator.set_state(state)\n",
        "            generator.get_state()\n",
        ("tests/step/test_guards.py::test_lazily_built_parameter_free_module_cache_with_dropout_draws_eagers_numbers",),
    ),
    PlantedFault(
        "verify: what is on one side only is no difference",
        "compiler/run/proof.py",
        "if name not in expected or name not in found or not same",
        "if name in expected and name in found and not same",
        ("tests/run/test_proof.py::test_names_of_what_differs_or_is_missing_come_in_order[measure0]",),
    ),
    PlantedFault(
        "step: tensors of a written batch may share memory",
        "compiler/run/plans.py",
        "if self.executor.written_leaves and len(",
        "if not self.executor.written_leaves and len(",
        ("tests/step/test_hazard_graphs.py::test_aliased_or_strided_batch_gives_eagers_bits[shifted-plain]",),
    ),
    PlantedFault(
        "step: a refused memory target leaves the parameters updated",
        "compiler/run/snapshot.py",
        "            tensor.detach().copy_(before)\n        state",
        "            tensor.detach()\n        state",
        (
            "tests/step/test_memory_targets.py::test_impossible_target_leaves_model_optimizer_and_random_state_as_they_were",
        ),
    ),
    PlantedFault(
        "interrupts: Ctrl-C strikes in the middle of the commit",
        "compiler/run/transaction.py",
        "            self._pending = True\n            return\n",
        "            self._pending = True\n",
        ("tests/step/test_interrupts.py::test_ctrl_c_before_any_op_of_the_update_waits_for_the_commit",),
    ),
    PlantedFault(
        "interrupts: Ctrl-C during the commit is lost",
        "compiler/run/transaction.py",
        "        if self._pending:\n            signal.raise_signal(signal.SIGINT)",
        "        if self._pending:\n            self._pending = False",
        ("tests/step/test_interrupts.py::test_ctrl_c_before_any_op_of_the_update_waits_for_the_commit",),
    ),
    PlantedFault(
        "explain: eager's scratch is not part of its peak",
        "compiler/ownership/eager_peak.py",
        "        most = max(most, level)\n",
        "        most = max(most, 0)\n",
        ("tests/step/test_steady.py::test_reported_eager_peak_is_within_one_percent_of_a_measured_eager_step",),
    ),
    PlantedFault(
        "explain: a batch norm that runs again counts as three ops",
        "compiler/explain/report.py",
        "return sum(not any(r.buffer in prepared for r in op.outputs) for op in again)",
        "return len(again)",
        ("tests/explain/test_explain_text.py::test_ops_that_are_run_again_are_those_of_the_plan_beyond_the_kept_one",),
    ),
    PlantedFault(
        "explain: the frontier rounds a target down",
        "compiler/explain/frontier.py",
        "rounded = math.ceil(share * 10**digits) / 10**digits",
        "rounded = math.floor(share * 10**digits) / 10**digits",
        ("tests/explain/test_frontier.py::test_setting_of_a_point_is_met_by_it_and_not_by_the_one_above[gpt]",),
    ),
    PlantedFault(
        "workspace: a buffer that somebody holds is handed out again",
        "workspace/pool.py",
        "            if buffer.held:\n                kept.append(buffer)",
        "            if buffer.held and buffer.step is None:\n                kept.append(buffer)",
        ("tests/workspace/test_workspace_reuse.py::test_a_steady_step_allocates_nothing_and_uses_the_same_bytes",),
    ),
    PlantedFault(
        "norm cache: a norm that the caller wrote is returned again",
        "norm_cache.py",
        "and version_of(entry.norm) == 0:",
        ":",
        (
            "tests/workspace/test_norm_cache.py::test_a_norm_has_no_gradient_and_one_that_was_overwritten_is_computed_anew",
        ),
    ),
    PlantedFault(
        "norm cache: fused optimizers are not seen",
        "norm_cache.py",
        "    torch.autograd.graph.increment_version([p for p in written if not p.is_inference()])",
        "    pass",
        ("tests/workspace/test_norm_cache.py::test_every_way_an_optimizer_updates_is_seen",),
    ),
    PlantedFault(
        "form: a read of what nothing has written passes",
        "compiler/form.py",
        '        if region.buffer not in written:\n            raise FormError(f"{field}',
        '        if region.buffer not in buffers:\n            raise FormError(f"{field}',
        ("tests/test_form.py::test_planted_fault_is_found_and_named[has a gradient that nobody writes]",),
    ),
    PlantedFault(
        "validator: what is rebuilt may read what is not there",
        "compiler/plan/rebuild_check.py",
        "                if v not in there:",
        "                if v not in self._size:",
        ("tests/plan/test_rebuild_check.py::test_choice_is_caught_if_and_only_if_something_is_read_that_is_not_there",),
    ),
    PlantedFault(
        "validator: a rebuilding may rise above its peak",
        "compiler/plan/rebuild_check.py",
        "if level_bytes > self._answer.peak_bytes:",
        "if level_bytes > 2 * self._answer.peak_bytes:",
        ("tests/plan/test_rebuild_check.py::test_fault_in_the_example_is_named",),
    ),
    PlantedFault(
        "audit: a name may keep bytes that are dead",
        "compiler/run/audit.py",
        "        if dead:\n",
        "        if len(dead) > 1:\n",
        ("tests/run/test_audit.py::test_every_drop_that_is_left_out_is_found",),
    ),
    PlantedFault(
        "plan: flat slices are not aligned",
        "flat.py",
        "ends[flat] += rounded_up(numel, ALIGNMENT_BYTES // dtype.itemsize)",
        "ends[flat] += numel",
        ("tests/test_flat.py::test_every_slice_is_aligned_and_in_exactly_one_bucket",),
    ),
    PlantedFault(
        "interrupts: what is undone is undone in the order it was done",
        "compiler/run/transaction.py",
        "for action in reversed(actions):",
        "for action in actions:",
        ("tests/run/test_transaction.py::test_abort_takes_back_last_first_then_cleans_up_and_an_end_only_cleans_up",),
    ),
)
