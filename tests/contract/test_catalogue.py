"""The fault catalogue: 53 faults, each with the tests that hold its expected behavior; all of them exist.

``stub`` marks rows that need a GPU, root, another system or hours, and are held against something pretended.
``adjusted`` says how and why a row's expectation differs from the catalogue's.
"""

import ast
import functools
from typing import NamedTuple

import pytest
from sources import TESTS, UNMARKED, parsed

SLOW = "pytest.mark.slow"


class Row(NamedTuple):
    fault: str
    tests: tuple
    stub: bool = False
    adjusted: str = ""


CATALOGUE = {
    1: Row("sampler SIGKILLed while it writes a row", (
        "fault_stubs::test_f01_a_writer_killed_before_any_of_its_lines_leaves_no_torn_row",
        "replay_ring::test_killed_writers_are_taken_over_and_nothing_is_torn")),
    2: Row("SIGKILL at random times, a storm", (
        "kill::test_every_role_is_killed_in_turn_and_training_goes_on",
        "storm::test_f02_a_short_storm_of_every_kind_of_fault_keeps_eight_invariants")),
    3: Row("sampler stopped for long, then continued", (
        "machine_faults::test_f03_a_stopped_sampler_is_killed_before_its_shard_is_given_away",)),
    4: Row("env.step raises", (
        "environment_faults::test_errors_and_bad_transitions_are_counted_and_training_goes_on",
        "hts::test_environments_that_raise_or_give_nan_cost_their_episodes_and_no_bit_depends_on_the_inference_workers",
        "hts::test_one_process_bears_errors_of_its_environments_too",
        "evaluator::test_evaluation_goes_on_when_errors_end_however_many_there_were",
        "collectors::test_too_many_errors_in_a_window_end_the_process_with_the_last_one")),
    5: Row("env.reset always raises", (
        "collectors::test_a_reset_that_always_raises_ends_the_process_instead_of_looping",
        "environment_faults::test_an_environment_that_never_works_is_refused_before_anything_starts",
        "environment_faults::test_an_environment_that_always_dies_ends_the_run_with_the_reason_at_the_top")),
    6: Row("env.step hangs", (
        "environment_faults::test_a_sampler_whose_environment_takes_it_down_is_started_again",
        "serial::test_an_environment_that_hangs_costs_an_episode_and_its_run_ends_as_asked",
        "serial::test_an_error_is_raised_in_code_that_does_not_return_in_time_and_where_it_is_caught_the_process_ends",
        "serial::test_a_request_to_stop_waits_for_an_environment_as_for_a_worker",
        "awake::test_code_that_lets_no_other_run_is_ended_from_outside")),
    7: Row("the constructor takes 90 s", (
        "worker_pool::test_each_phase_has_its_own_deadline",
        "worker_pool::test_a_start_has_a_deadline_of_its_own_which_is_told_and_named",
        "odd_envs::test_one_that_starts_too_slowly_is_told_with_its_place_and_the_setting_and_waited_for_aloud",
        "odd_envs::test_an_environment_that_is_slow_to_start_is_made_few_times",
        "collectors::test_making_environments_keeps_the_heartbeat_going"),
        stub=True),
    8: Row("the environment segfaults", (
        "environment_faults::test_a_sampler_whose_environment_takes_it_down_is_started_again",)),
    9: Row("the environment ends the process", (
        "worker_pool::test_exit_0_without_being_done_is_a_failure",
        "worker_pool::test_what_a_worker_wrote_last_stands_in_the_reason_of_its_end_unless_it_reported_one",
        "odd_envs::test_an_environment_that_dies_is_told_with_its_last_words",
        "environment_faults::test_a_sampler_whose_environment_takes_it_down_is_started_again")),
    10: Row("the environment leaks memory", (
        "machine_faults::test_f10_a_worker_that_leaks_is_started_anew_and_a_sampler_is_offered_to_the_oom_killer_first",)),
    11: Row("the environment starts grandchildren", (
        "environment_faults::test_processes_that_an_environment_started_end_with_it",
        "machine_faults::test_f11_f38_what_an_environment_started_ends_with_a_killed_supervisor",
        "processes::test_what_a_marked_process_starts_is_found_whatever_session_and_variables_it_has")),
    12: Row("wrong shape, type or no observation at all", (
        "envs::test_what_cannot_be_stored_is_refused_with_field_and_value",
        "envs::test_an_array_of_one_element_is_its_element",
        "env_habits::test_a_picture_that_is_none_is_refused_with_what_was_found",
        "environment_faults::test_errors_and_bad_transitions_are_counted_and_training_goes_on")),
    13: Row("NaN or infinite observation or reward", (
        "collectors::test_a_bad_transition_is_counted_refused_and_never_stored",
        "env_habits::test_a_reward_that_leaves_float32_is_refused",
        "env_habits::test_vector_environments_refuse_it_too_and_may_give_arrays_of_one",
        "interleavings::test_an_error_cuts_its_episode_at_the_last_good_row_and_changes_nothing_for_the_others",
        "evaluator::test_an_error_costs_its_episode_and_the_score_says_so",
        "play::test_an_error_of_the_environment_costs_an_episode_and_is_told",
        "collectors::test_the_first_bad_transition_ends_it_when_asked_so")),
    14: Row("huge finite reward", (
        "fault_stubs::test_f14_a_huge_reward_is_stored_and_bounded_where_it_is_learned",
        "env_habits::test_sums_of_rewards_stay_within_float32",
        "env_habits::test_a_spike_does_not_poison_running_statistics")),
    15: Row("terminated and truncated", (
        "loss_values::test_target_bootstraps_unless_terminated",
        "collectors::test_an_ended_episode_keeps_its_true_last_observation_and_only_termination_is_stored",
        "transitions::test_truncation_finishes_the_rest_and_still_bootstraps")),
    16: Row("NaN or infinite loss or gradient", (
        "off_policy::test_non_finite_batch_is_refused_and_counted",
        "fault_stubs::test_f16_many_skipped_updates_in_a_row_end_the_learner_which_then_goes_back_to_its_checkpoint",
        "worker_pool::test_a_learner_that_keeps_failing_ends_the_run_with_its_last_words")),
    17: Row("weights with NaN about to be published", (
        "weights::test_values_that_are_not_finite_are_never_published",)),
    18: Row("learner SIGKILLed", ("kill::test_every_role_is_killed_in_turn_and_training_goes_on",)),
    19: Row("out of memory in the middle of a run, on a GPU or a processor", (
        "fault_stubs::test_f19_stub_where_the_device_is_too_small_half_of_the_batch_is_taken_and_said",
        "fault_stubs::test_f19_a_processor_without_memory_for_the_batch_goes_on_with_what_fits",
        "cuda_graphs::test_after_a_recording_that_failed_the_allocator_is_not_asked_for_its_cache",
        "fault_stubs::test_f19_stub_memory_that_never_suffices_is_no_endless_loop"), stub=True),
    20: Row("sticky CUDA error", (
        "fault_stubs::test_f20_stub_any_other_device_error_ends_the_process_and_is_never_caught",), stub=True),
    21: Row("GPU lost, its monitor hangs", (
        "hardware::test_hung_driver_does_not_hang_the_caller",
        "utilisation::test_hung_driver_never_holds_a_sample_up_and_its_old_figures_expire",
        "worker_pool::test_a_learner_that_keeps_failing_ends_the_run_with_its_last_words"), stub=True,
        adjusted="the run ends with the reason and its checkpoint instead of pausing: a lost GPU comes back with a "
                 "reboot at best, and a resume continues from there"),
    22: Row("a GPU gone at resume", (
        "fault_stubs::test_f22_stub_a_device_that_is_gone_is_named_and_auto_takes_what_is_there",
        "device_split::test_a_run_whose_gpu_is_gone_says_so_at_resume_and_goes_on_where_it_is_told_to"), stub=True,
        adjusted="a device asked for by number is refused by name instead of replaced silently; auto looks"),
    23: Row("memory, hang or crash inside the batch probe", (
        "measure::test_a_candidate_that_crashes_or_hangs_is_data_and_the_next_is_measured",
        "measure::test_a_batch_beyond_the_memory_cap_fails_alone",
        "tuning_cache::test_a_failure_of_every_candidate_is_one_line_and_not_remembered")),
    24: Row("noise or another user while probing", (
        "search::test_noise_of_three_per_cent_does_not_change_the_answer",), stub=True),
    25: Row("no GPU, one core, quota of half a core, cpuset", (
        "hardware::test_quota_of_cgroup_v2", "hardware::test_cpuset_narrows_affinity",
        "doctor::test_half_a_core_is_a_warning_with_its_reason"), stub=True),
    26: Row("too little shared memory", (
        "fault_stubs::test_f26_stub_shared_memory_that_is_full_is_refused_with_both_sizes_before_the_first_touch",
        "shared_memory::test_a_whole_machine_and_more_is_refused"), stub=True),
    27: Row("too little memory (control group)", (
        "shared_memory::test_control_group_limit_counts_if_it_is_tighter",
        "odd_envs::test_heavy_environments_are_as_many_as_there_is_memory_for_with_the_reason",
        "odd_envs::test_numbers_of_the_user_that_do_not_fit_are_refused_with_what_would"), stub=True),
    28: Row("disk full while a checkpoint is written", (
        "machine_faults::test_f28_a_full_disk_keeps_the_old_checkpoint_and_the_run_goes_on",
        "machine_faults::test_f28_a_full_disk_at_the_start_of_a_session_leaves_the_settings_of_the_one_before",
        "store::test_full_disk_is_counted_and_made_good_later",
        "store::test_trouble_is_told_once_and_its_end_with_the_rows_lost",
        "recorder::test_metrics_that_cannot_be_stored_are_told_at_once_and_at_the_end",
        "weights::test_a_disk_that_fails_keeps_the_old_version")),
    29: Row("SIGKILL at every step of a save", ("crash_points::test_f29_every_crash_point_of_every_save_loads",)),
    30: Row("power loss: unsynced data gone, renames kept", (
        "crash_points::test_f30_whatever_a_power_loss_leaves_the_newest_durable_checkpoint_loads",
        "crash_points::test_f30_a_power_loss_leaves_the_settings_of_this_session_or_of_the_one_before",
        "crash_points::test_f30_no_power_loss_gives_two_starts_of_the_learner_one_epoch",
        "resume_checks::test_settings_that_were_cut_anywhere_are_refused",
        "resume_checks::test_without_run_json_the_counters_come_from_the_checkpoint"), stub=True),
    31: Row("truncated, flipped or empty weights file", (
        "weights::test_every_flipped_byte_and_every_truncation_is_refused_or_changes_nothing",
        "weights::test_any_bytes_as_pointer_or_weights_end_in_a_refusal",
        "odd_weights::test_each_odd_value_of_the_metadata_is_used_or_refused_in_one_line")),
    32: Row("a reader opens what rotation deletes", (
        "weights::test_readers_live_through_a_publisher_that_deletes_at_once",)),
    33: Row("weights older than held", (
        "weights::test_only_newer_versions_are_read_and_epoch_counts_more_than_version",)),
    34: Row("checkpoint of another network or format", (
        "off_policy::test_state_of_another_network_is_refused_and_nothing_is_changed",
        "checkpoint::test_another_format_is_refused_by_name")),
    35: Row("malicious pickle in the run folder", (
        "fault_stubs::test_f35_a_pickle_in_place_of_any_file_is_refused_and_never_executed",
        "import_layers::test_nothing_is_ever_unpickled")),
    36: Row("Ctrl-C once, twice, in start-up, while tuning", (
        "stop::test_the_last_checkpoint_has_as_long_as_it_needs_and_shows_what_is_left",
        "stop::test_a_second_ctrl_c_gives_the_last_checkpoint_up",
        "stop::test_ctrl_c_once_leaves_checkpoint_summary_and_evaluation",
        "stop::test_ctrl_c_twice_ends_in_order_too", "stop::test_ctrl_c_while_python_imports_is_no_traceback",
        "stop::test_ctrl_c_while_a_slow_environment_is_tried_ends_it_before_a_run_exists",
        "stop::test_ctrl_c_while_starting_leaves_nothing_behind",
        "awake::test_a_second_ctrl_c_ends_a_process_that_is_held_up_with_all_that_it_has_started",
        "serial::test_a_second_ctrl_c_leaves_an_environment_at_once",
        "endings::test_runs_stopped_once_and_twice_end_in_order",
        "machine_faults::test_f36_ctrl_c_while_tuning_ends_all_children_without_a_traceback")),
    37: Row("SIGTERM, closed terminal", (
        "terminal_closed::test_f37_a_closed_terminal_ends_no_run",
        "sigterm_all::test_f37_sigterm_to_every_process_at_once_leaves_the_last_checkpoint",
        "stop::test_other_ways_to_stop_are_as_one_ctrl_c", "stop::test_signals_are_counted_and_never_raise",
        "stop::test_a_terminal_that_is_gone_changes_nothing_but_what_is_seen",
        "stop::test_a_terminal_that_stands_still_holds_up_nothing_and_ctrl_z_stops_all",
        "kill::test_workers_heed_no_signal_that_asks_to_end_and_yet_end_with_their_supervisor",
        "processes::test_what_an_environment_starts_ends_when_it_is_told_to"),
        adjusted="SIGHUP is no Ctrl-C: a closed terminal ends no run; SIGTERM is one Ctrl-C, however often it comes"),
    38: Row("supervisor SIGKILLed", (
        "kill::test_killed_supervisor_takes_all_workers_along_and_the_next_start_works",
        "machine_faults::test_f11_f38_what_an_environment_started_ends_with_a_killed_supervisor",
        "endings::test_a_killed_supervisor_leaves_nobody",
        "run_directory::test_the_lock_ends_with_the_process_that_held_it")),
    39: Row("the whole group SIGKILLed", ("kill::test_killed_group_leaves_nothing",)),
    40: Row("dashboard killed, many clicks on Start", (
        "control::test_a_started_run_outlives_the_page_that_is_killed",
        "control::test_many_clicks_at_once_start_one_run")),
    41: Row("two runs at once, same or other name", (
        "json_documents::test_two_runs_at_once_do_not_meet",
        "run_directory::test_automatic_names_of_runs_that_start_together_differ",
        "resume::test_a_running_run_is_not_resumed",
        "run_directory::test_without_file_locks_a_run_is_alive_while_the_process_that_it_names_is",
        "tuning_cache::test_a_lock_that_somebody_holds_for_longer_than_a_tuning_takes_ends_no_start",
        "sibling_processes::test_two_runs_at_once_are_no_strangers_to_each_other_and_a_busy_process_is_one_to_both")),
    42: Row("another process has the number of the one to stop", (
        "run_directory::test_no_stranger_is_killed_in_place_of_a_supervisor",), stub=True),
    43: Row("the clock is set by a day", (
        "fault_stubs::test_f43_a_clock_that_is_set_changes_no_duration_and_no_deadline",
        "run_directory::test_a_supervisor_is_recognized_by_the_start_of_its_process",
        "run_directory::test_the_age_of_a_request_does_not_depend_on_the_clock",
        "checkpoint::test_newest_by_epoch_and_updates_not_by_time"), stub=True),
    44: Row("the laptop sleeps, Ctrl-Z", (
        "worker_pool::test_nobody_is_blamed_when_the_machine_slept",
        "awake::test_a_long_gap_without_work_is_sleep_and_leaves_the_clock_where_it_was",
        "awake::test_ctrl_z_stops_a_process_without_a_shell_too_and_its_clock_with_it",
        "awake::test_a_family_is_stopped_and_goes_on_but_for_what_was_stopped_before",
        "measure::test_what_was_measured_while_the_tuner_was_stopped_is_measured_again",
        "envs::test_a_probe_that_was_stopped_meanwhile_is_tried_again"), stub=True),
    45: Row("limits of descriptors, threads, processes", (
        "machine_faults::test_f45_too_few_open_files_are_a_clear_error_and_nothing_is_left",
        "worker_pool::test_a_process_that_cannot_be_started_counts_as_a_failure")),
    46: Row("evaluator or visualizer crashes, no display", (
        "kill::test_every_role_is_killed_in_turn_and_training_goes_on",
        "worker_pool::test_evaluator_and_visualizer_rest_without_harm_and_are_tried_again",
        "visualizer::test_an_environment_that_cannot_be_drawn_is_told_once_and_ends_quietly")),
    47: Row("standard output closed, log disk full", (
        "machine_faults::test_f47_a_reader_that_goes_away_and_a_full_log_disk_end_no_run",
        "output::test_f23_closed_standard_streams_end_no_verb",
        "output::test_f23_a_run_without_standard_streams_trains_and_none_of_its_files_takes_their_place",
        "output::test_lines_that_nobody_reads_are_dropped_and_counted_once_somebody_does",
        "machine_faults::test_f47_an_environment_that_prints_trains_on_a_full_disk",
        "logs::test_a_full_disk_costs_output_and_nothing_else",
        "logs::test_a_log_keeps_the_newest_and_neither_disk_nor_memory_hold_much_more",
        "terminal::test_stream_that_broke_never_stops_a_run")),
    48: Row("damaged or enormous metrics", (
        "store::test_a_damaged_file_is_told_kept_and_a_new_one_begun",
        "store::test_damage_that_shows_while_a_run_writes_costs_no_later_row",
        "recorder::test_a_damaged_file_of_metrics_is_told_and_its_evaluations_come_from_the_csv",
        "store::test_truncated_or_overwritten_file_never_gives_another_error",
        "store::test_hostile_file_cannot_hang_the_reader", "evaluator::test_a_damaged_line_of_the_curve_is_left_out",
        "live_api::test_a_first_answer_is_bounded_and_keeps_the_peak")),
    49: Row("hostile profile", ("setting_layers::test_hostile_profiles_are_refused_at_once",)),
    50: Row("hostile run name, linked run directory", (
        "run_directory::test_no_name_leaves_the_runs_directory",
        "schema::test_a_name_that_is_taken_is_one_harmless_path_component",
        "control::test_nothing_outside_the_runs_directory_is_deleted")),
    51: Row("hostile remote sampler", ("machine_faults::test_f51_there_is_no_remote_sampler_and_nothing_listens",),
            adjusted="there are no remote samplers: the row holds that no process of a run opens a socket"),
    52: Row("resume twice, of a running run, after another version", (
        "resume::test_a_running_run_is_not_resumed", "checkpoint::test_another_format_is_refused_by_name",
        "resume::test_another_algorithm_task_or_network_is_refused")),
    53: Row("slow sampler in the repeatable modes", (
        "hts::test_another_number_of_inference_workers_and_slow_steps_change_no_bit", "hts_matrix::test_no_bit_differs",
        "interleavings::test_the_same_errors_give_the_same_bits_whatever_the_inference_workers_and_the_order",
        "hts::test_a_sampler_that_keeps_failing_ends_the_run_with_its_name",
        "machine_faults::test_f53_stalls_change_no_bit_of_the_serial_mode")),
}  # fmt: skip


@functools.cache
def known_tests(folder):
    """``file::name`` of every test function, without the file's ``test_`` -> whether it is marked slow."""
    found = {}
    for path in folder.rglob("test_*.py"):
        tree = parsed(path)
        marks = next((ast.unparse(node.value) for node in tree.body if isinstance(node, ast.Assign)
                      and ast.unparse(node.targets[0]) == "pytestmark"), "")  # fmt: skip
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                slow = any(ast.unparse(mark) == SLOW for mark in node.decorator_list) or SLOW in marks
                slow |= path.parent.name == "slow" and node.name not in UNMARKED
                found[f"{path.stem.removeprefix('test_')}::{node.name}"] = slow
    return found


def test_all_53_faults_are_there():
    assert list(CATALOGUE) == list(range(1, 54))
    assert all(row.fault and row.tests for row in CATALOGUE.values())


@pytest.mark.parametrize("number", CATALOGUE)
def test_each_fault_has_tests_that_exist(number):
    tests = CATALOGUE[number].tests
    assert [name for name in tests if name not in known_tests(TESTS)] == []
    assert not all(known_tests(TESTS)[name] for name in tests), "one of them at least has to run each time"
