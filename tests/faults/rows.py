"""List of faults, each with the tests that cover it.

Add a row, or a test to a row, whenever a fault is found. A test is named by its file under `tests/`, or under
`csrc/tests/`, and its function; `test_rows.py` checks that it exists. `scenario_rows.py` continues the list.
The file is longer than others, because the rows of one document are in one place.
"""

from typing import NamedTuple

SESSIONS = 14
FAULTS = 20


class Row(NamedTuple):
    """A fault, and its tests; `pending` says what a test would need."""

    number: str
    fault: str
    tests: tuple[str, ...] = ()
    pending: str = ""


_SESSIONS = "failures/test_sessions.py"
_SILENCE = "failures/test_silence.py"
_MEMBERS = "groups/test_membership_processes.py"
_JOINING = "groups/test_joining.py"
_KILLED = "failures/test_killed_workers.py"
_STEPS = "faults/test_protocol_steps.py"
_NETWORKS = "faults/test_real_networks.py"
_LIMITS = "faults/test_limits.py"
_SCHEDULES = "faults/test_schedules.py"
_OVERLOAD = "failures/test_overload.py"
_HOSTILE = "failures/test_hostile_peers.py"
_STORE = "groups/test_store_security.py"
_REPORTS = "groups/test_wait_reports.py"


def tests_of(file: str, *names: str) -> tuple[str, ...]:
    """Return the tests of a file."""
    return tuple(f"{file}::{name}" for name in names)


ROWS = (
    # Sessions: what breaks between one connection and the next
    Row(
        "S1.1",
        "one of two connections of a pair breaks",
        (
            *tests_of("failures/test_resume.py", "test_one_of_several_connections_breaks"),
            *tests_of(_NETWORKS, "test_reset_lanes_cost_no_transfer", "test_a_reset_that_one_end_sees"),
            *tests_of("session_test.cc", "both_dial_at_once"),
        ),
    ),
    Row("S1.2", "an id is used again", tests_of(_JOINING, "test_ids_are_not_used_again")),
    Row(
        "S1.3",
        "a replaced process that lives goes on being called",
        (
            *tests_of(_MEMBERS, "test_replaced_process_gets_no_calls"),
            *tests_of(_NETWORKS, "test_a_replaced_host_that_wakes_up_is_fenced"),
        ),
    ),
    Row(
        "S1.4",
        "a busy member is thrown out",
        tests_of(_JOINING, "test_join_does_not_wait_for_a_busy_member", "test_silent_member_stays_a_member"),
    ),
    Row(
        "S1.5",
        "news of a loss overtakes messages of the next session",
        (
            *tests_of(
                _SESSIONS,
                "test_the_next_session_waits_until_the_end_of_the_last_is_handled",
                "test_messages_of_an_ended_session_count_nothing",
            ),
            *tests_of("engine_sessions_test.cc", "a_session_opens_after_the_loss_of_the_last"),
        ),
    ),
    Row(
        "S1.6",
        "a reset leaves references behind",
        (
            *tests_of(_SESSIONS, "test_the_next_session_works_at_once", "test_both_ends_lose_what_the_session_counted"),
            *tests_of(_SESSIONS, "test_a_reply_of_an_ended_session_takes_its_references_back"),
            *tests_of(_NETWORKS, "test_a_reset_connection_between_live_processes"),
            *tests_of(
                _SCHEDULES,
                "test_a_few_schedules_of_sessions_that_outlive_connections",
                "test_many_schedules_of_sessions_that_outlive_connections",
            ),
            *tests_of("faults/test_connections.py", "test_a_creation_right_after_a_loss_is_kept_or_lost_at_both_ends"),
            *tests_of(_SCHEDULES, "test_a_few_schedules", "test_many_schedules"),
        ),
    ),
    Row(
        "S1.7", "a process dies while it joins", tests_of(_MEMBERS, "test_newcomer_is_killed", "test_leaver_is_killed")
    ),
    Row(
        "S1.8",
        "deadlines begin again at the receiver",
        (
            *tests_of("engine_deadlines_test.cc", "the_timeout_is_that_of_the_sending"),
            *tests_of("rpc/test_cancellation.py", "test_an_expired_call_never_runs"),
        ),
    ),
    Row("S1.9", "a message is too large", tests_of("failures/test_oversize.py", "test_arguments", "test_result")),
    Row(
        "S1.10",
        "exits in pickling",
        tests_of(
            "rpc/test_exits_in_user_code.py",
            "test_a_result_that_cannot_be_encoded_raises_at_the_caller",
            "test_a_task_of_a_handler",
        ),
    ),
    Row(
        "S1.11",
        "contexts of a dead trainer",
        (
            *tests_of("faults/test_connections.py", "test_requests_in_the_context_of_a_dead_trainer_leave_nothing"),
            *tests_of("autograd/test_contexts.py", "test_late_messages_leave_no_context"),
            *tests_of(_SESSIONS, "test_contexts_of_an_ended_session_end"),
            *tests_of("faults/test_connections.py", "test_a_context_whose_root_is_lost_leaves_nothing"),
        ),
    ),
    Row(
        "S1.12",
        "signals in the step gate",
        tests_of("autograd/test_step_gate.py", "test_a_signal_while_a_step_waits_leaves_the_gate"),
    ),
    Row(
        "S1.13",
        "smaller ones: shutdown and a silent store, two closes at once",
        (
            *tests_of("groups/test_silent_store.py", "test_a_member_leaves_while_the_stores_host_is_stopped"),
            *tests_of("failures/test_shutdowns.py", "test_a_second_shutdown_waits_for_the_first"),
        ),
    ),
    Row(
        "S1.14",
        "a connection breaks while a large result, or a large argument of an asynchronous call, is on its way",
        (
            *tests_of(
                "failures/test_resumed_tensors.py",
                "test_a_fresh_result_is_sent_again",
                "test_an_unchanged_result_is_sent_again",
                "test_a_changed_result_is_not_sent_again",
                "test_arguments_of_asynchronous_calls",
            ),
            *tests_of("engine_verify_test.cc", "a_large_result_is_left_out_if_its_owner_does_not_answer"),
        ),
    ),
    # Sessions, section 2.1: what sees an event
    Row("S2 kill", "kill -9, at each step of each protocol", tests_of(_STEPS, "test_every_wait_ends_at_each_step")),
    Row(
        "S2 shutdown",
        "kill -9 and SIGSTOP in a graceful shutdown",
        (
            *tests_of(_STEPS, "test_a_graceful_shutdown_ends_at_each_step"),
            *tests_of(_SILENCE, "test_a_graceful_shutdown_does_not_wait_for_a_silent_member"),
        ),
    ),
    Row(
        "S2 partition",
        "power loss, partition, no reset",
        tests_of(
            _NETWORKS,
            "test_both_sides_of_a_cut_lose_each_other",
            "test_a_cut_in_one_direction_is_a_loss_for_both",
            "test_a_worker_that_comes_back_under_another_address",
        ),
    ),
    Row("S2 stop", "SIGSTOP", tests_of(_SILENCE, "test_everything_that_waits_for_a_stopped_process_ends")),
    Row(
        "S2 slow",
        "2 GB in flight, and the GIL held for a minute",
        tests_of(_SILENCE, "test_two_gigabytes_to_a_worker_that_holds_the_gil_for_a_minute"),
    ),
    Row(
        "S2 reset in shutdown",
        "a connection breaks while a server waits for its trainers",
        tests_of(
            "faults/test_connections.py",
            "test_a_server_that_shuts_down_waits_for_a_trainer_whose_connection_broke",
        ),
    ),
    Row(
        "S2 restart",
        "a rank comes back in a static group",
        tests_of(_MEMBERS, "test_rank_of_a_static_group_comes_back", "test_references_of_a_process_that_is_replaced"),
    ),
    Row(
        "S2 store",
        "the host of the store dies",
        (
            *tests_of(_KILLED, "test_death_of_the_stores_host"),
            *tests_of(
                "groups/test_etcd.py", "test_leader_of_etcd_is_killed", "test_newcomers_join_without_the_first_worker"
            ),
        ),
    ),
    # Sessions, section 3: trust
    Row(
        "S3.1",
        "users are not checked without descriptors",
        tests_of("peer_credentials_test.cc", "users_are_found_without_a_free_descriptor"),
    ),
    Row(
        "S3.2",
        "unauthenticated connections take the descriptors",
        tests_of("engine_unauthenticated_test.cc", "the_last_descriptors_are_for_the_program"),
    ),
    Row(
        "S3.3",
        "the store listens everywhere and takes forged records",
        tests_of(_STORE, "test_store_on_loopback_listens_only_there", "test_forged_record"),
    ),
    Row(
        "S3.4",
        "bytes after the handshake can be changed",
        tests_of("security/test_encryption.py", "test_a_changed_byte_ends_the_session_without_data"),
    ),
    Row(
        "S3.5",
        "processes of another user",
        tests_of(_HOSTILE, "test_process_of_another_user_is_rejected_on_the_same_host"),
    ),
    Row(
        "S3.6",
        "members",
        (
            *tests_of(_HOSTILE, "test_a_members_id_cannot_be_reused"),
            *tests_of("engine_sessions_test.cc", "an_older_process_is_refused"),
            *tests_of("security/test_allow_list.py", "test_other_functions_are_refused"),
            *tests_of("security/test_no_pickle.py", "test_no_pickle_in_a_request_is_loaded"),
            *tests_of("security/test_encryption.py", "test_a_worker_with_the_certificate_of_another_is_refused"),
        ),
    ),
    # Sessions, section 4: limits
    Row(
        "S4 replies",
        "replies to a peer that does not read",
        tests_of("failures/test_reply_window.py", "test_replies_to_a_stopped_caller_wait_with_their_requests"),
    ),
    Row("S4 memory", "arenas", tests_of("failures/test_memory_budget.py", "test_32_workers_within_the_budget")),
    Row(
        "S4 requests",
        "counts of requests and their bytes",
        (
            *tests_of(
                _OVERLOAD,
                "test_calls_wait_while_too_many_have_no_reply",
                "test_a_member_that_does_not_wait_for_replies_is_disconnected",
                "test_a_callee_that_does_not_read",
                "test_a_callee_that_cannot_be_reached",
                "test_a_callee_that_cannot_be_reached_and_large_calls",
            ),
            *tests_of("engine_overload_waiting_test.cc", "admitted_messages_never_end_a_session"),
        ),
    ),
    Row(
        "S4 depth",
        "calls that are nested without end",
        tests_of(
            _OVERLOAD,
            "test_functions_that_call_each_other_without_end",
            "test_a_member_cannot_nest_more_deeply_than_its_callee_allows",
        ),
    ),
    Row("S4 names", "names without end", tests_of(_OVERLOAD, "test_a_name_that_a_peer_does_not_keep")),
    Row(
        "S4 objects",
        "codec amplification",
        tests_of(_OVERLOAD, "test_arguments_of_many_objects", "test_results_of_many_objects"),
    ),
    Row(
        "S4 peers",
        "workers without end",
        (
            *tests_of(_OVERLOAD, "test_a_member_cannot_invent_workers_without_end"),
            *tests_of(_JOINING, "test_workers_that_have_left_make_room"),
            *tests_of("engine_overload_waiting_test.cc", "peers_that_have_left_make_room"),
        ),
    ),
    # Faults, by their numbers
    Row(
        "F1",
        "a process dies in a join or leave",
        tests_of(_MEMBERS, "test_newcomer_is_killed", "test_leaver_is_killed"),
    ),
    Row(
        "F2",
        "a newcomer that cannot talk to the members",
        (
            *tests_of(_JOINING, "test_newcomer_that_a_member_refuses", "test_newcomer_with_another_secret"),
            *tests_of(_NETWORKS, "test_a_newcomer_behind_a_firewall_changes_nothing"),
        ),
    ),
    Row(
        "F3",
        "a worker comes back on another machine",
        tests_of(_NETWORKS, "test_a_worker_that_comes_back_under_another_address"),
    ),
    Row(
        "F4",
        "silence",
        (
            *tests_of(_SILENCE, "test_everything_that_waits_for_a_stopped_process_ends"),
            *tests_of(
                _NETWORKS,
                "test_both_sides_of_a_cut_lose_each_other",
                "test_a_long_cut_heals",
                "test_a_short_cut_costs_no_call",
            ),
        ),
    ),
    Row(
        "F5",
        "two workers of one name",
        (
            *tests_of(_JOINING, "test_name_of_a_live_worker", "test_newcomer_that_cannot_reach_a_live_member"),
            *tests_of(_NETWORKS, "test_a_newcomer_behind_a_firewall_changes_nothing"),
        ),
    ),
    Row(
        "F6", "a join waits for the slowest member", tests_of(_MEMBERS, "test_stopped_member_does_not_delay_a_newcomer")
    ),
    Row(
        "F7",
        "no memory for a message (RLIMIT_AS)",
        tests_of("failures/test_out_of_memory.py", "test_no_memory_fails_the_call_alone"),
    ),
    Row(
        "F8",
        "a small call behind a huge transfer",
        tests_of("rpc/test_overtaking.py", "test_small_calls_during_a_large_argument_and_a_large_result"),
    ),
    Row(
        "F9",
        "replies without back-pressure",
        tests_of("failures/test_reply_window.py", "test_replies_to_a_stopped_caller_wait_with_their_requests"),
    ),
    Row(
        "F10",
        "daemon threads at the end of the interpreter",
        tests_of("failures/test_interpreter_exit.py", "test_a_few_exits", "test_many_exits"),
    ),
    Row("F11", "a rank of a static group comes back", tests_of(_MEMBERS, "test_rank_of_a_static_group_comes_back")),
    Row(
        "F12",
        "the store dies with rank 0",
        tests_of(
            "groups/test_etcd.py",
            "test_newcomers_join_without_the_first_worker",
            "test_rank_0_of_a_static_group_comes_back",
        ),
    ),
    Row(
        "F13",
        "a wrong error from a pass next to a loss",
        (
            *tests_of(
                "faults/test_lost_passes.py",
                "test_gradients_for_the_part_of_a_worker_with_a_loss",
                "test_gradients_that_arrive_after_a_death",
                "test_a_part_that_cannot_reach_the_root",
                "test_a_result_without_its_context_is_an_error",
            ),
            *tests_of(_SCHEDULES, "test_a_few_schedules", "test_many_schedules"),
            *tests_of(_STEPS, "test_every_wait_ends_at_each_step"),
        ),
    ),
    Row(
        "F14",
        "news of a loss without its incarnation",
        (
            *tests_of("faults/test_late_news.py", "test_the_successor_of_a_process_waits_for_the_news_of_its_end"),
            *tests_of(
                "groups/test_group_api.py",
                "test_new_incarnation_drops_what_the_old_one_held",
                "test_the_end_of_an_older_process_is_no_loss_of_the_newer",
            ),
            *tests_of("engine_sessions_test.cc", "the_end_of_an_older_incarnation_leaves_the_session_of_a_newer_one"),
            *tests_of(
                "groups/test_member_changes.py",
                "test_the_connection_to_a_successor_stays_when_its_predecessor_is_lost",
            ),
        ),
    ),
    Row(
        "F15",
        "another program has the port",
        tests_of(_REPORTS, "test_another_program_has_the_port", "test_another_program_has_the_port_and_sends_nothing"),
    ),
    Row("F16", "an interrupt while a worker waits at a file store", tests_of(_REPORTS, "test_interrupted_at_once")),
    Row("F17", "an exit in a forked child", tests_of("groups/test_forks.py", "test_a_child_of_a_handler_ends_with_it")),
    Row(
        "F18",
        "a graceful shutdown in a handler",
        tests_of("failures/test_shutdowns.py", "test_a_graceful_shutdown_in_a_handler_is_an_error"),
    ),
    Row("F19", "a host that cannot be resolved", tests_of(_REPORTS, "test_unknown_host", "test_unresponsive_resolver")),
    Row(
        "F20",
        "several workers of one process in a static group",
        tests_of("groups/test_one_process.py", "test_workers_of_one_process_join"),
    ),
    # Faults, scenarios beyond the numbers
    Row(
        "descriptors",
        "no descriptors at the caller or the callee",
        tests_of(_LIMITS, "test_a_caller_without_descriptors", "test_a_callee_without_descriptors"),
    ),
    Row(
        "corruption",
        "bytes change on the way",
        tests_of(
            "testing/test_fault_rules.py",
            "test_a_corrupted_header_ends_the_connection",
            "test_a_corrupted_body_is_rejected_by_tls",
            "test_corrupted_bodies_never_crash",
        )
        + tests_of(
            _SCHEDULES, "test_a_few_schedules_with_damaged_messages", "test_many_schedules_with_damaged_messages"
        ),
    ),
    Row(
        "proof",
        "a worker with a secret gives no information before the proof of its peer",
        (
            *tests_of(
                "security/test_proof_order.py",
                "test_a_peer_that_sends_nothing_gets_nothing",
                "test_a_peer_that_says_hello_gets_a_nonce",
                "test_a_peer_with_a_wrong_proof_gets_one_word",
                "test_a_peer_cannot_leave_its_proof_out",
            ),
            *tests_of("handshake_attacks_test.cc", "the_initiator_proves_itself_first"),
        ),
    ),
    Row(
        "leases",
        "shared memory of lost messages and killed peers",
        (
            *tests_of("testing/test_fault_rules.py", "test_leases_of_dropped_tensors_are_returned"),
            *tests_of("failures/test_shared_memory.py", "test_memory_shared_with_a_killed_peer_is_released"),
        ),
    ),
    Row(
        "at most once",
        "a call never runs twice",
        (
            *tests_of("faults/test_connections.py", "test_a_cut_at_each_message_of_a_call"),
            *tests_of(_NETWORKS, "test_a_reset_connection_between_live_processes"),
        ),
    ),
)
