"""The security defaults, each with the tests that hold it; and fuzz: any bytes end in a typed error, quickly."""

import json
import os
import stat
import tracemalloc

import numpy as np
import psutil
import pytest
from dashboard_browser import server
from hypothesis import given, settings
from hypothesis import strategies as st
from test_catalogue import TESTS, known_tests

from spreeze.config.layers import resolve
from spreeze.config.profiles import read_profile
from spreeze.config.schema import check_name
from spreeze.errors import SpreezeError
from spreeze.metrics.store import MetricsReader
from spreeze.run_directory import RunDir, read_run, state_of
from spreeze.transport.checkpoint import CheckpointStore
from spreeze.transport.weights import LATEST, WeightsStore, read_weights
from spreeze.workers.evaluator import read_rows

DEFAULTS = {
    1: ("checkpoints without pickle", (
        "fault_stubs::test_f35_a_pickle_in_place_of_any_file_is_refused_and_never_executed",
        "stop::test_updates_stop_exactly_and_no_file_holds_objects_that_would_be_executed")),
    2: ("no foreign .pt is ever loaded", ("import_layers::test_no_text_becomes_code_and_no_file_becomes_objects",)),
    3: ("no NumPy file with objects", ("import_layers::test_no_text_becomes_code_and_no_file_becomes_objects",)),
    4: ("profiles are data", ("setting_layers::test_hostile_profiles_are_refused_at_once",
                              "security::test_any_bytes_as_a_profile_are_settings_or_one_error")),
    5: ("a module is imported only where the command line names it", (
        "envs::test_a_prefix_names_a_module_only_together_with_import",
        "play::test_a_weights_file_cannot_make_a_module_be_imported",
        "control::test_an_environment_that_the_command_line_would_not_trust_is_refused")),
    6: ("names stay inside", ("run_directory::test_no_name_leaves_the_runs_directory",
                              "security::test_any_text_as_a_name_is_one_component_or_refused")),
    7: ("no shell", ("import_layers::test_no_text_becomes_code_and_no_file_becomes_objects",)),
    8: ("everything listens here only, or not at all", (
        "security::test_the_dashboard_is_bound_to_this_machine",
        "security::test_the_dashboard_s_processes_listen_on_this_machine_only",
        "machine_faults::test_f51_there_is_no_remote_sampler_and_nothing_listens")),
    9: ("nothing is shown and nothing done without the page's token", (
        "access_guard::test_the_websocket_opens_with_the_token_and_the_whole_origin",
        "access_guard::test_anybody_else_is_refused",
        "access_guard::test_the_token_works_once",
        "access_guard::test_without_the_right_token_nothing_is_shown",
        "access_guard::test_switched_off_each_page_lets_in_and_other_origins_still_cannot_act",
        "access_link::test_the_token_of_a_folder_is_private_and_stays",
        "access_link::test_a_log_holds_no_token_and_names_the_private_file",
        "access_link::test_the_command_of_the_readme_lets_in_by_its_terminal_only",
        "access_link::test_a_browser_gets_in_by_the_private_file_and_another_one_does_not")),
    10: ("pages show text as text", ("security::test_no_page_trusts_html_from_a_run",)),
    11: ("private memory and directories", ("run_directory::test_a_new_run_is_private_and_has_its_places",
                                            "security::test_files_of_a_run_are_reached_by_its_owner_only")),
    15: ("control characters are stripped", (
        "store::test_events_and_evaluations_come_back_without_control_characters",
        "terminal::test_first_error_stands_at_the_top_with_its_process_and_is_plain_text",
        "foreign_text::test_the_list_of_runs_is_plain_text",
        "foreign_text::test_every_verb_tells_of_a_foreign_run_in_plain_text",
        "foreign_text::test_the_memory_of_the_tuner_is_told_in_plain_text",
        "foreign_text::test_the_tuner_s_tables_show_a_foreign_record_as_it_is_written",
        "foreign_text::test_nothing_prints_but_through_the_one_place")),
    16: ("no eval, no shell, no pickle in the source", (
        "import_layers::test_nothing_is_ever_unpickled",
        "import_layers::test_no_text_becomes_code_and_no_file_becomes_objects")),
    17: ("no privilege is asked for", ("security::test_nothing_changes_users_or_drivers",)),
    18: ("a run writes inside of its own directory only", (
        "run_directory_links::test_every_path_of_a_finished_run_is_refused_as_a_link",
        "run_directory_links::test_every_path_that_code_may_write_is_refused_as_a_link",
        "run_directory_links::test_a_run_s_directory_that_is_a_link_is_refused",
        "run_directory_links::test_no_file_with_a_second_name_is_written_through",
        "run_directory_links::test_a_pipe_is_refused_too",
        "run_directory_links::test_a_request_to_a_run_follows_no_link",
        "run_directory_links::test_a_clip_of_a_foreign_run_stays_inside")),
    19: ("a policy is sent on the user's word only, without what is private, and one that comes is data", (
        "hub::test_nothing_is_sent_without_a_yes_and_what_would_be_is_listed_before",
        "hub::test_all_that_describes_the_policy_is_sent_and_nothing_of_the_machine_s_paths",
        "hub::test_a_run_with_a_link_is_not_sent",
        "hub::test_a_link_in_a_repository_is_not_taken")),
}  # fmt: skip
"""Rows 12 to 14 are about remote samplers, which do not exist; 18 and 19 have none in the list of the others."""
SOURCE = TESTS.parent / "spreeze"
EXAMPLES = 1000 if "SPREEZE_LONG_TESTS" in os.environ else 25
"""Of each fuzz test; the long form takes minutes."""
BYTES = st.one_of(
    st.binary(max_size=400),
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
                 lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
                 max_leaves=12).map(lambda value: json.dumps(value).encode()),
    st.integers(2, 3000).map(lambda depth: b"[" * depth),
)  # fmt: skip


@pytest.mark.parametrize("number", DEFAULTS)
def test_each_default_has_tests_that_exist(number):
    tests = DEFAULTS[number][1]
    assert [name for name in tests if name not in known_tests(TESTS)] == []
    assert not all(known_tests(TESTS)[name] for name in tests), "one of them at least has to run each time"


def bounded(action):
    """Runs it: a result or an error raised on purpose, within 50 MB; one that hangs ends with the test's time."""
    tracemalloc.start()
    try:
        return action()
    except SpreezeError:
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 50e6


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=BYTES)
def test_any_bytes_as_a_manifest_are_refused(tmp_path_factory, data):
    store = CheckpointStore(tmp_path_factory.mktemp("m"))
    saved = store.save({"a": np.zeros(2, np.float32)}, {}, epoch=1, updates=1)
    (saved / "MANIFEST.json").write_bytes(data)
    assert bounded(store.load_latest) is None


@settings(max_examples=EXAMPLES, deadline=None)
@given(size=st.integers(0, 2**64 - 1), data=BYTES)
def test_any_header_of_a_weights_file_is_refused(tmp_path_factory, size, data):
    path = tmp_path_factory.mktemp("w") / "w-000001-000000000001.safetensors"
    for header in (size, len(data)):
        path.write_bytes(header.to_bytes(8, "little") + data)
        assert bounded(lambda: read_weights(path)) is None


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=BYTES)
def test_any_bytes_as_pointer_run_file_or_curve_give_nothing(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("r")
    for name in (LATEST, "run.json", "eval.csv"):
        (folder / name).write_bytes(data)
    assert bounded(WeightsStore(folder).read_latest) is None
    assert isinstance(bounded(lambda: read_run(folder)), dict)
    assert isinstance(bounded(lambda: state_of(folder)), str)
    assert isinstance(bounded(lambda: read_rows(folder / "eval.csv")), list)


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.binary(max_size=300), start=st.sampled_from([b"", b"SQLite format 3\x00"]))
def test_any_bytes_as_metrics_are_empty_or_one_error(tmp_path_factory, data, start):
    path = tmp_path_factory.mktemp("s") / "metrics.db"
    path.write_bytes(start + data)
    bounded(MetricsReader(path).latest)


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.one_of(BYTES, st.text(max_size=200).map(lambda text: f"[sac]\ngamma = {text}".encode(errors="replace"))))
def test_any_bytes_as_a_profile_are_settings_or_one_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("p") / "profile.toml"
    path.write_bytes(data)
    bounded(lambda: resolve([read_profile(str(path))]))


@settings(max_examples=200, deadline=None)
@given(name=st.text(max_size=200))
def test_any_text_as_a_name_is_one_component_or_refused(name):
    checked = bounded(lambda: check_name(name))
    assert checked is None or (checked == name and "/" not in name and name not in (".", "..") and len(name) <= 128)


def test_the_dashboard_is_bound_to_this_machine():
    text = (TESTS.parent / ".streamlit" / "config.toml").read_text(encoding="utf-8")
    wanted = (
        'address = "localhost"', "enableXsrfProtection = true", "enableCORS = true", "gatherUsageStats = false",
        "enableStaticServing = false", 'fileWatcherType = "none"', 'showErrorDetails = "type"',
    )  # fmt: skip
    for line in wanted:
        assert line in text


def test_the_dashboard_s_processes_listen_on_this_machine_only(tmp_path):
    with server(tmp_path, tmp_path / "log") as (_, process):
        tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        sockets = [socket for each in tree for socket in each.net_connections("inet")]
    listening = {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}
    assert listening
    assert listening <= {"127.0.0.1", "::1"}


def test_no_page_trusts_html_from_a_run():
    users = [path.name for path in (SOURCE / "dashboard").glob("*.py") if "unsafe_allow_html=True" in path.read_text()]
    assert users == []


def test_files_of_a_run_are_reached_by_its_owner_only(tmp_path):
    run = RunDir.create(tmp_path / "runs", "one")
    run.write_state(state="running")
    try:
        assert stat.S_IMODE(run.path.stat().st_mode) == 0o700  # whatever the files inside allow
        assert stat.S_IMODE((run.path / "run.lock").stat().st_mode) == 0o600
    finally:
        run.close()


def test_nothing_changes_users_or_drivers():
    words = ("setuid", "setgid", "sudo", "nvidia-smi -", "nvmlDeviceSet", "os.chown")
    assert [(path.name, word) for path in SOURCE.rglob("*.py") for word in words if word in path.read_text()] == []
