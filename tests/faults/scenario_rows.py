"""Scenarios of clusters that misbehave, each with the tests that cover it.

They continue the list of `rows.py`: K1 to K9 are kills, stopped processes, networks, restarts, overload, ends of
processes, wrong set-ups, a long mixed run, and kills and stopped processes in further operations.
"""

from rows import Row, tests_of

SCENARIOS = (12, 5, 5, 5, 13, 10, 9, 1, 6)
"""The number of scenarios in each section."""

_KILLS = "faults/test_kills.py"
_STEPS = "faults/test_protocol_steps.py"
_KILLED = "failures/test_killed_workers.py"
_SILENCE = "failures/test_silence.py"
_NETWORKS = "faults/test_real_networks.py"
_ADDRESSES = "faults/test_host_addresses.py"
_LOAD = "faults/test_load.py"
_LIMITS = "faults/test_limits.py"
_EXITS = "faults/test_exits.py"
_FORKS = "groups/test_forks.py"
_ERRORS = "failures/test_user_errors.py"
_HOSTILE = "failures/test_hostile_peers.py"
_STREAMS = "faults/test_streams_of_lost_peers.py"
_PARTICIPANTS = "faults/test_lost_participants.py"
_OWNERS = "faults/test_lost_owners.py"
_MEMBERS = "groups/test_membership_processes.py"


def _row(number: str, scenario: str, *tests: tuple[str, ...]) -> Row:
    return Row(number, scenario, tuple(test for each in tests for test in each))


_EACH_STEP = tests_of(_STEPS, "test_every_wait_ends_at_each_step")
_IN_SHUTDOWN = tests_of(_STEPS, "test_a_graceful_shutdown_ends_at_each_step")

SCENARIO_ROWS = (
    # Section 1: kill -9
    _row(
        "K1.1",
        "the callee of a large push or pull, over shared memory",
        tests_of(_KILLS, "test_a_callee_is_killed_while_it_receives", "test_a_callee_is_killed_while_it_sends"),
        tests_of("failures/test_shared_memory.py", "test_memory_shared_with_a_killed_peer_is_released"),
    ),
    _row(
        "K1.2",
        "the callee of a large push or pull, over TCP",
        tests_of(_KILLS, "test_a_callee_is_killed_while_it_receives", "test_a_callee_is_killed_while_it_sends"),
    ),
    _row("K1.3", "a caller in its transfer", tests_of(_KILLS, "test_a_caller_is_killed_while_it_sends")),
    _row("K1.4", "the owner of a value being made", tests_of(_KILLS, "test_an_owner_is_killed_while_it_makes_a_value")),
    _row("K1.5", "the owner of references of two others", tests_of(_KILLED, "test_references_of_a_killed_worker")),
    _row("K1.6", "a holder of references to others", tests_of(_KILLED, "test_references_of_a_killed_worker")),
    _row("K1.7", "the middle worker of a backward pass", _EACH_STEP),
    _row("K1.8", "the root of a context", _EACH_STEP),
    _row("K1.9", "an owner in an optimizer step", _EACH_STEP),
    _row(
        "K1.10",
        "the leader, a middle one and the last in a graceful shutdown",
        tests_of(_KILLS, "test_any_worker_is_killed_in_a_graceful_shutdown"),
        _IN_SHUTDOWN,
    ),
    _row("K1.11", "before it has joined", tests_of(_KILLS, "test_a_worker_is_killed_before_its_record_is_written")),
    _row(
        "K1.12",
        "after it has written its record",
        tests_of(_KILLS, "test_a_worker_is_killed_after_its_record_is_written"),
    ),
    # Section 2: SIGSTOP
    _row(
        "K2.1",
        "calls without a deadline, and the process resumes",
        tests_of(_SILENCE, "test_calls_to_a_stopped_process_run_once_when_it_resumes"),
    ),
    _row("K2.2", "calls with a deadline", tests_of(_SILENCE, "test_a_deadline_ends_a_call_to_a_stopped_process")),
    _row(
        "K2.3",
        "calls without a deadline, for good",
        tests_of(_SILENCE, "test_everything_that_waits_for_a_stopped_process_ends"),
    ),
    _row(
        "K2.4",
        "a graceful shutdown without a limit, for good",
        tests_of(_SILENCE, "test_a_graceful_shutdown_does_not_wait_for_a_silent_member"),
    ),
    _row(
        "K2.5",
        "a graceful shutdown with a limit, for good",
        tests_of(_SILENCE, "test_a_shutdown_with_a_limit_names_a_stopped_process"),
    ),
    # Section 3: networks
    _row(
        "K3.1",
        "packets are dropped for good, in a call, in a transfer and at the one cut off",
        tests_of(
            _NETWORKS, "test_both_sides_of_a_cut_lose_each_other", "test_a_cut_in_one_direction_is_a_loss_for_both"
        ),
    ),
    _row(
        "K3.2",
        "a short cut",
        tests_of(_NETWORKS, "test_a_short_cut_costs_no_call", "test_a_short_cut_costs_no_transfer"),
    ),
    _row("K3.3", "a long cut that heals", tests_of(_NETWORKS, "test_a_long_cut_heals")),
    _row(
        "K3.4",
        "a host loses its power and comes back at the same address",
        tests_of(_NETWORKS, "test_a_worker_that_comes_back_under_the_same_address"),
    ),
    _row(
        "K3.5",
        "the way to a worker is silent before the first call",
        tests_of(_ADDRESSES, "test_a_host_that_is_silent_before_the_first_call"),
    ),
    # Section 4: restarts
    _row(
        "K4.1",
        "the same name after a kill in a dynamic group",
        tests_of("groups/test_rendezvous.py", "test_dynamic_group_replaces_a_dead_worker"),
    ),
    _row(
        "K4.2",
        "calls under way never reach the successor",
        tests_of(_MEMBERS, "test_calls_to_a_killed_process_never_reach_its_successor"),
    ),
    _row(
        "K4.3",
        "old references are lost, and new ones work",
        tests_of(
            _MEMBERS,
            "test_calls_to_a_killed_process_never_reach_its_successor",
            "test_references_of_a_process_that_is_replaced",
        ),
    ),
    _row("K4.4", "a rank of a static group", tests_of(_MEMBERS, "test_rank_of_a_static_group_comes_back")),
    _row(
        "K4.5",
        "rank 0 dies, and the others go on",
        tests_of("groups/test_dynamic_groups.py", "test_members_continue_without_the_host"),
        tests_of(_KILLED, "test_death_of_the_stores_host"),
        tests_of("groups/test_etcd.py", "test_newcomers_join_without_the_first_worker"),
    ),
    # Section 5: overload
    _row("K5.1", "many calls that no thread waits for", tests_of(_LOAD, "test_calls_that_no_thread_waits_for")),
    _row(
        "K5.2",
        "calls of many threads",
        tests_of(_LOAD, "test_calls_of_many_threads"),
        tests_of("rpc/test_calls_concurrency.py", "test_eight_threads_call_at_once"),
    ),
    _row(
        "K5.3",
        "deep chains over workers with few threads",
        tests_of(_LOAD, "test_deep_chains_over_workers_with_few_threads"),
        tests_of("rpc/test_calls_timeouts.py", "test_deep_ping_pong_with_few_threads"),
        tests_of("rpc/test_calls_concurrency.py", "test_idle_threads_exit"),
    ),
    _row(
        "K5.4",
        "a slow callee",
        tests_of("rpc/test_calls_concurrency.py", "test_senders_wait_for_a_slow_callee"),
    ),
    _row(
        "K5.5",
        "replies that a stopped caller does not take",
        tests_of("failures/test_reply_window.py", "test_replies_to_a_stopped_caller_wait_with_their_requests"),
    ),
    _row(
        "K5.6",
        "small calls next to a huge transfer",
        tests_of("rpc/test_overtaking.py", "test_small_calls_during_a_large_argument_and_a_large_result"),
    ),
    _row(
        "K5.7",
        "a message over max_header_bytes",
        tests_of(_HOSTILE, "test_message_over_the_header_limit_is_an_error_of_its_call"),
    ),
    _row("K5.8", "many references, dropped or held", tests_of(_LOAD, "test_many_references")),
    _row("K5.9", "many contexts with an error", tests_of(_LOAD, "test_many_contexts_with_an_error_inside")),
    _row(
        "K5.10",
        "few descriptors and many callers",
        tests_of(_LIMITS, "test_a_callee_with_few_descriptors_serves_many_callers"),
    ),
    _row("K5.11", "no large files (RLIMIT_FSIZE)", tests_of(_LIMITS, "test_workers_that_may_not_write_large_files")),
    _row(
        "K5.12",
        "no memory for a message (RLIMIT_AS)",
        tests_of("failures/test_out_of_memory.py", "test_no_memory_fails_the_call_alone"),
    ),
    _row(
        "K5.13",
        "a control group without memory for a message",
        tests_of(_LIMITS, "test_a_callee_that_the_kernel_kills_for_its_memory"),
    ),
    # Section 6: forks, exits, signals
    _row(
        "K6.1", "a fork in a handler", tests_of(_FORKS, "test_handler_forks", "test_a_child_of_a_handler_ends_with_it")
    ),
    _row("K6.2", "a data loader with forked workers", tests_of(_FORKS, "test_data_loader")),
    _row(
        "K6.3",
        "a subprocess, sys.exit, os._exit and a shutdown in a handler",
        tests_of(_EXITS, "test_a_handler_that_ends_something"),
    ),
    _row(
        "K6.4",
        "SIGINT in each wait",
        tests_of(
            "failures/test_interrupts.py",
            "test_a_wait_for_another_worker",
            "test_a_graceful_shutdown_with_a_handler_that_runs",
        ),
    ),
    _row("K6.5", "SIGTERM", tests_of(_KILLED, "test_death_of_the_stores_host")),
    _row("K6.6", "SIGTERM with a handler that exits", tests_of(_EXITS, "test_a_handler_of_sigterm_that_exits")),
    _row("K6.7", "SIGINT in init_rpc", tests_of("groups/test_wait_reports.py", "test_interrupted_at_once")),
    _row(
        "K6.8",
        "an exit without a shutdown",
        tests_of("failures/test_shutdowns.py", "test_programs_without_shutdown_exit_silently"),
        tests_of(_KILLED, "test_process_that_exits_without_shutdown"),
    ),
    _row(
        "K6.9",
        "a second shutdown, and several at once",
        tests_of(_ERRORS, "test_before_and_after_and_twice"),
        tests_of("failures/test_shutdowns.py", "test_shutdown_from_two_threads_at_once"),
        tests_of("rpc/test_calls_groups.py", "test_shutdown_twice_and_by_several_threads"),
    ),
    _row("K6.10", "many starts in one process", tests_of(_EXITS, "test_many_starts_in_one_process_leave_nothing")),
    # Section 7: wrong set-ups
    _row("K7.1", "world sizes differ", tests_of(_ERRORS, "test_wrong_world_size_fails_all_at_once")),
    _row("K7.2", "a name is used twice", tests_of(_ERRORS, "test_two_workers_of_one_name")),
    _row("K7.3", "secrets differ", tests_of(_HOSTILE, "test_worker_with_another_secret", "test_wrong_secret")),
    _row(
        "K7.4",
        "versions of the protocol differ",
        tests_of(_HOSTILE, "test_another_version"),
        tests_of("groups/test_joining.py", "test_newcomer_that_a_member_refuses"),
    ),
    _row(
        "K7.5",
        "loopback is advertised to another host",
        tests_of(_ADDRESSES, "test_a_worker_that_advertises_loopback"),
    ),
    _row(
        "K7.6",
        "an address of no host is advertised",
        tests_of(_ADDRESSES, "test_a_worker_that_advertises_an_address_of_no_host"),
    ),
    _row("K7.7", "hosts without IPv4", tests_of(_ADDRESSES, "test_hosts_without_ipv4")),
    _row(
        "K7.8",
        "many unauthenticated connections",
        tests_of(_HOSTILE, "test_calls_next_to_many_unauthenticated_connections"),
        tests_of("engine_unauthenticated_test.cc", "unauthenticated_connections_do_not_block_a_member"),
    ),
    _row(
        "K7.9",
        "the wall clock jumps",
        tests_of("static/test_clocks.py", "test_deadlines_and_heartbeats_use_monotonic_clocks"),
    ),
    # Section 8: a long mixed run
    _row("K8.1", "mixed work next to kills and cuts", tests_of("bench/test_soak.py", "test_a_minute_of_it")),
    # Section 9: kill -9 and SIGSTOP in streams, retried calls, group operations and services
    _row(
        "K9.1", "the callee of a stream, between two items", tests_of(_STREAMS, "test_the_callee_of_a_stream_is_lost")
    ),
    _row(
        "K9.2", "the caller of a stream, between two items", tests_of(_STREAMS, "test_the_caller_of_a_stream_is_lost")
    ),
    _row(
        "K9.3",
        "the callee of a retried call, and a new process takes its name",
        tests_of(_OWNERS, "test_a_retried_call_runs_on_the_successor_of_a_lost_callee"),
    ),
    _row(
        "K9.4",
        "the callee of a retried call, for good",
        tests_of(_OWNERS, "test_a_retried_call_without_a_successor_ends"),
    ),
    _row(
        "K9.5",
        "a member in a barrier, an all_gather or a broadcast",
        tests_of(
            _PARTICIPANTS,
            "test_a_member_is_lost_in_a_group_operation",
            "test_a_member_is_stopped_before_it_is_connected",
        ),
    ),
    _row("K9.6", "the owner of a service", tests_of(_OWNERS, "test_the_owner_of_a_service_is_lost")),
)
