"""The faults that docs/trust.md lists: what goes wrong, what comes of it, and the test that says so; and Ctrl-C.

tests/test_trust.py demands that each of these tests is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from revision import told


@dataclass(frozen=True)
class PlantedTrouble:
    """A line of the table. `tests` are `file::function`, below tests/."""

    fault: str
    outcome: str
    tests: tuple[str, ...]


_TAKEN_BACK = "the step is taken back, and the next one is right"
_OUT, _LITTLE = "gpu/test_cuda_out_of_memory.py", "gpu/test_cuda_little_memory.py"

TROUBLE = (
    PlantedTrouble(
        "no room for the arena: in a first plan, in a larger one, in both modes",
        _TAKEN_BACK,
        ("step/test_trouble.py::test_no_room_for_the_arena_takes_the_step_back_and_the_next_one_is_right",),
    ),
    PlantedTrouble(
        "no room in any kernel of a recording, of a replay, of a microbatch",
        _TAKEN_BACK,
        (
            "step/test_interrupts.py::test_interrupt_while_recording_takes_the_step_back",
            "step/test_interrupts.py::test_interrupt_before_any_op_of_forward_or_backward_takes_the_step_back",
            "step/test_accumulation_faults.py::test_a_call_that_fails_before_the_first_addition_changes_nothing",
        ),
    ),
    PlantedTrouble(
        "no room on a GPU, before any op",
        _TAKEN_BACK,
        (
            "run/test_allocator_executor.py::test_failure_before_any_op_of_forward_or_backward_takes_the_step_back",
            "gpu/test_cuda.py::test_step_that_fails_is_taken_back",
        ),
    ),
    PlantedTrouble(
        "no room where torch's allocator places (a GPU): in a recording, in eager's run beside it, in eager beside the "
        "first replay, in the first replay, in a plain step of another shape",
        "the step is taken back and made all the same, by a plan that was recorded on an excerpt; where that has no "
        "room either, an error, and nothing is changed",
        (
            f"{_OUT}::test_recording_that_is_refused_memory_is_made_of_an_excerpt",
            f"{_OUT}::test_recording_that_is_always_refused_memory_changes_nothing",
            f"{_OUT}::test_eagers_second_run_beside_a_recording_is_made_on_an_excerpt",
            f"{_OUT}::test_eager_without_room_beside_the_first_replay_is_run_on_an_excerpt",
            f"{_OUT}::test_first_replay_that_is_refused_memory_is_planned_anew",
            f"{_OUT}::test_plain_step_that_is_refused_memory_gets_a_plan",
        ),
    ),
    PlantedTrouble(
        "the same in the forward, in the backward and in the clipping of a later replay, in the second call of an "
        "accumulation, for an optimizer's first state",
        "an error, and nothing is changed; the next step is right",
        (
            f"{_OUT}::test_later_replay_that_is_refused_memory_is_taken_back_until_its_update_writes",
            f"{_OUT}::test_second_call_of_an_accumulation_that_is_refused_memory_leaves_what_waits",
            f"{_OUT}::test_optimizer_without_room_for_its_state_leaves_none_behind",
        ),
    ),
    PlantedTrouble(
        "the same once the update has begun to write, or gradients that wait are being added to",
        "as in eager, parameters may be half updated, or all gradients that wait are dropped: the error says which; "
        "statistics and random state are put back",
        (
            f"{_OUT}::test_later_replay_that_is_refused_memory_is_taken_back_until_its_update_writes",
            f"{_OUT}::test_second_call_of_an_accumulation_that_is_refused_memory_leaves_what_waits",
            f"{_OUT}::test_optimizer_that_fails_half_way_says_so",
        ),
    ),
    PlantedTrouble(
        "the same where a sample is compared, a cluster is compiled or compared, the machine is measured",
        "the step is made: without the sample, with eager's kernels, with rates from a table",
        (
            f"{_OUT}::test_sample_that_is_refused_memory_is_left_out",
            f"{_OUT}::test_cluster_that_cannot_be_compiled_for_want_of_memory_runs_with_eagers_kernels",
            f"{_OUT}::test_kernel_that_finds_no_room_to_be_compared_is_compared_later",
            f"{_OUT}::test_no_room_to_measure_the_machine_takes_its_rates_from_the_table",
        ),
    ),
    PlantedTrouble(
        "the same when the step has been made and its plan is not yet",
        "the error says that the step was made",
        (f"{_OUT}::test_step_that_was_made_and_has_no_room_for_a_plan_says_so",),
    ),
    PlantedTrouble(
        "a GPU that really has too little, from none to enough, at each of these stages",
        "the step is eager's, or one of the outcomes above",
        (
            f"{_LITTLE}::test_step_is_eagers_or_nothing_is_lost",
            f"{_LITTLE}::test_another_shape_is_eagers_or_nothing_is_lost",
            f"{_LITTLE}::test_second_call_of_an_accumulation_leaves_what_waits",
        ),
    ),
    PlantedTrouble(
        "a failure while a failed step is put back",
        "everything else is put back, and the first error is raised",
        ("run/test_transaction.py::test_one_that_fails_to_put_back_does_not_stop_the_others",),
    ),
    PlantedTrouble(
        "an exception in `loss_fn`",
        "it goes through; what waits for an update is kept",
        (
            "step/test_refusals.py::test_exception_of_the_user_passes_through_unchanged",
            "step/test_accumulation_faults.py::test_an_exception_in_the_users_code_leaves_what_waits",
        ),
    ),
    PlantedTrouble(
        "an exception in the data loader; workers that are forked or spawned",
        "it goes through; the bits are eager's",
        ("step/test_trouble.py::test_batches_of_workers_are_trained_as_in_eager_and_what_they_raise_goes_through",),
    ),
    PlantedTrouble(
        "an exception in the optimizer's own step",
        "the step is taken back with its statistics",
        (
            "step/test_interrupts.py::test_optimizer_whose_own_step_raises_takes_statistics_back",
            "step/test_accumulation_faults.py::test_an_optimizer_that_raises_leaves_no_gradients",
        ),
    ),
    PlantedTrouble(
        "Ctrl-C before any line of a replay, a first replay, a recording",
        "the state of a complete step",
        (
            "step/test_interrupts.py::test_ctrl_c_before_any_line_of_a_replay_leaves_the_state_of_a_complete_step",
            "step/test_interrupts.py::"
            "test_ctrl_c_before_any_line_of_a_plans_first_replay_leaves_the_state_of_a_complete_step",
            "step/test_interrupts.py::test_ctrl_c_before_any_line_of_a_recording_leaves_the_state_of_a_complete_step",
        ),
    ),
    PlantedTrouble(
        "a cache that is full, read-only, a file, corrupted, or gone",
        "one warning; the plan is made anew",
        (
            "run/test_cache_faults.py::test_folder_that_is_full_or_read_only_is_one_warning",
            "run/test_cache_faults.py::test_disk_that_is_full_half_way_keeps_the_earlier_entries",
            "run/test_cache_faults.py::test_spoiled_entries_count_as_absent_and_are_mended",
            "run/test_cache_faults.py::test_entries_under_each_others_names_count_as_absent",
            "run/test_cache_faults.py::test_file_in_the_place_of_the_folder_is_one_warning",
            "run/test_cache_faults.py::test_folder_that_goes_away_between_two_processes_is_made_anew",
        ),
    ),
    PlantedTrouble(
        "two processes compile the native parts at once",
        "both run; a torn file is never opened",
        ("run/test_allocator.py::test_two_processes_compile_at_once_and_a_third_finds_a_torn_file",),
    ),
    PlantedTrouble(
        "steps on threads: on another one, on several at once, one step on two",
        "right; one step on two threads at once is refused",
        (
            "step/test_interrupts.py::test_steps_from_a_thread_that_is_not_the_main_one_are_right",
            "step/test_interrupts.py::test_step_recorded_on_one_thread_is_replayed_on_another",
            "step/test_interrupts.py::test_two_threads_may_record_and_replay_at_the_same_time",
            "step/test_interrupts.py::test_step_called_on_two_threads_at_once_is_refused_on_the_second",
        ),
    ),
    PlantedTrouble(
        "a step that is collected while it runs",
        "it ends what it does, and goes",
        (
            "step/test_trouble.py::test_step_that_nobody_holds_any_more_ends_what_it_does",
            "step/test_interrupts.py::test_step_that_is_dropped_gives_its_arena_back",
        ),
    ),
    PlantedTrouble(
        "NaN and infinities in a batch, in a loss, with and without clipping",
        "eager's, in the same places",
        (
            "step/test_trouble.py::test_nan_and_inf_in_a_replays_batch_give_eagers_bits",
            "step/test_refusals.py::test_nan_loss_is_allowed_and_the_same_as_eagers",
        ),
    ),
    PlantedTrouble(
        "an exception in a collective: at any bucket, in a recording, a first replay, a later one",
        "it is told; nothing is changed, and later steps are refused",
        ("parallel/test_collective.py::test_collective_that_fails_changes_nothing_and_is_told",),
    ),
    PlantedTrouble(
        "a group of 2 and of 4: a rank that raises, or hangs",
        "the others are told when the group's time is up; nothing is changed",
        ("parallel/test_group.py::test_ranks_that_wait_for_one_in_trouble_are_told",),
    ),
    PlantedTrouble(
        "a group of 2 and of 4: a rank that dies",
        "the others are told; nothing is changed",
        (
            "parallel/test_group.py::test_the_other_rank_is_told_when_one_dies",
            "parallel/test_group.py::test_ranks_that_wait_for_a_dead_one_are_told",
        ),
    ),
    PlantedTrouble(
        "a group of 2 and of 4: ranks with other shapes, or another model",
        "as `DistributedDataParallel`; another model is refused",
        ("parallel/test_group.py::test_two_ranks", "parallel/test_group.py::test_four_ranks_as_two"),
    ),
)


def table() -> str:
    rows = ["| fault | outcome | tests |", "|---|---|---|"]
    for line in TROUBLE:
        files: dict[str, list[str]] = {}
        for test in line.tests:
            file, _, name = test.partition("::")
            files.setdefault(file, []).append(name.removeprefix("test_").replace("_", " "))
        said = "; ".join(f"[{file}](../tests/{file}): {', '.join(names)}" for file, names in files.items())
        rows.append(f"| {line.fault} | {line.outcome} | {said} |")
    return "\n".join(rows)


_INTERRUPTS = """## Ctrl-C at random moments

{interrupts:,} interrupts by a timer that struck inside of a step, of tiny models with options that are drawn anew again
and again. After each, parameters, buffers, optimizer, scaler and random state must be those of a complete step, before
or after it, everything that a step sets for its time must be as it was, and the next steps must be eager's, bit by bit.
"faults": interrupts after which something was not.

| code | interrupts | while recording | in a replay | faults |
|---|--:|--:|--:|---|
{rows}

{last} `benchmarks/interrupts.py`, {about}, torch {torch}, Python {python}, {device}{commit}.
"""


def interrupts(found: Mapping[str, Any]) -> str:
    """`found`: of one run, or several under "runs", the last one of the newest code."""
    runs = found.get("runs", [found])
    rows = []
    for run in runs:
        recording = run["by kind of step"].get("recording", 0)
        faults = "; ".join(f"{n} x {_in_a_cell(kind)}{_mended(run, kind)}" for kind, n in run["faults"].items())
        counts = f"{run['interrupts']:,} | {recording:,} | {run['interrupts'] - recording:,}"
        rows.append(f"| {run.get('code', 'of this run')} | {counts} | {faults or 'none'} |")
    newest = runs[-1]
    last = f"Of the {newest['interrupts']:,} of the last run, {sum(newest['faults'].values()) or 'none'} left a fault."
    return _INTERRUPTS.format(
        interrupts=sum(run["interrupts"] for run in runs),
        rows="\n".join(rows),
        last=f"**{last}**" if newest["faults"] else last,
        about=found.get("date") or found["about"],
        commit=told([found["machine"]]),
        **{k: found["machine"][k] for k in ("torch", "python", "device")},
    )


def _in_a_cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def _mended(run: Mapping[str, Any], kind: str) -> str:
    why = run.get("mended since", {}).get(kind)
    return f" ({_in_a_cell(why)})" if why else ", **not mended**"
