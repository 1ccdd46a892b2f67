"""Which of several ranks' errors is told first."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from shardwise.errors import ConfigError, PeerFailure, follows_from_a_peer
from shardwise.train.failures import (
    Failure,
    RankLog,
    describe_failures,
    describe_stop,
    failure_of,
    log_path,
    remove_empty_logs,
    unreported_failure,
)
from shardwise.train.launch import AssignedRank, joined_process_group


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return caught


def test_a_ranks_own_error_is_reported_before_its_peers_errors_whoever_reported_first():
    lost = failure_of(raised(PeerFailure("rank 1 is dead")), 0)
    reset = failure_of(raised(RuntimeError("Connection reset by peer")), 2)
    own = failure_of(raised(ValueError("my data is wrong")), 1)
    reported = describe_failures([lost, reset, own], 3, None)
    assert reported.startswith("error: rank 1 failed\nTraceback")
    assert reported.index("ValueError: my data is wrong") < reported.index("rank 1 is dead")
    assert "  then:  rank 0: PeerFailure: rank 1 is dead" in reported
    assert "  then:  rank 2: RuntimeError: Connection reset by peer" in reported


def test_the_earlier_of_two_independent_errors_is_reported_first():
    late = Failure(0, 2.0, "Traceback\nLateError", "LateError")
    early = Failure(1, 1.0, "Traceback\nEarlyError", "EarlyError")
    assert describe_failures([late, early], 2, None).startswith("error: rank 1 failed\nTraceback\nEarlyError")


def test_a_killed_rank_is_reported_before_unfamiliar_errors_of_its_peers():
    odd = failure_of(raised(RuntimeError("[enforce fail] something of gloo's")), 0)
    killed = unreported_failure(1, -9)
    assert describe_failures([odd, killed], 2, None).startswith("error: rank 1 was killed by SIGKILL")


def test_a_killed_rank_is_reported_before_what_arrived_meanwhile_however_late_it_was_noticed():
    odd = replace(failure_of(raised(RuntimeError("[enforce fail] something of gloo's")), 0), at_seconds=5.0)
    killed = unreported_failure(1, -9, [odd])
    assert describe_failures([odd, killed], 2, None).startswith("error: rank 1 was killed by SIGKILL")


def test_a_failed_rendezvous_is_reported_after_the_peer_that_ended():
    assigned = AssignedRank(0, 2, 0, 2, "127.0.0.1", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.init_process_group", lose_a_peer)
        with (
            pytest.raises(ConfigError, match="could not rendezvous") as caught,
            joined_process_group(assigned, "cpu"),
        ):
            pass
    assert failure_of(caught.value, 0).is_consequence


def lose_a_peer(*_args, **_kwargs):
    raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:21176")


def test_an_abort_is_reported_after_the_error_that_may_have_caused_it():
    own = failure_of(raised(ValueError("mine")), 0)
    assert describe_failures([unreported_failure(1, -6), own], 2, None).startswith("error: rank 0 failed")
    assert describe_failures([unreported_failure(1, -6)], 2, None).startswith(
        "error: rank 1 was killed by SIGABRT"
    )


def test_an_exit_without_an_error_is_reported_as_such():
    assert "rank 1 exited with status 7" in describe_failures([unreported_failure(1, 7)], 2, None)


def test_an_error_that_is_not_valid_text_is_still_logged_and_reported(tmp_path):
    log = RankLog(tmp_path, 0)
    try:
        failure = log.record_failure(raised(FileNotFoundError("no file 'caf\udce9.txt'")))
    finally:
        log.close()
    assert "no file 'caf\\udce9.txt'" in log_path(tmp_path, 0).read_text()
    assert "no file 'caf\udce9.txt'" in failure.text


def test_an_error_that_cannot_be_printed_is_still_reported():
    class Unprintable(RuntimeError):
        def __str__(self):
            raise ValueError("no text for you")

    failure = failure_of(raised(Unprintable()), 1)
    assert failure.summary == "Unprintable: <no text>"
    assert describe_failures([failure], 2).startswith("error: rank 1 failed\nTraceback")


def test_the_report_names_logs_and_checkpoints_if_there_are_any(tmp_path):
    failure = failure_of(raised(ValueError("mine")), 1)
    assert "logs" not in describe_failures([failure], 2, None, tmp_path)
    assert "--resume" not in describe_failures([failure], 2, tmp_path, tmp_path)
    (tmp_path / "step-00000002").mkdir()
    reported = describe_failures([failure], 2, tmp_path / "logs", tmp_path)
    assert f"  logs:  {tmp_path / 'logs'}\n  fix:   fix the cause, and continue with --resume" in reported
    # What an error made for users says of itself is enough, but its traceback is in the log.
    reported = describe_failures(
        [failure_of(raised(ConfigError("no", fix="yes")), 1)], 2, tmp_path / "logs", tmp_path
    )
    assert reported == f"error: no\n  fix:   yes\n  logs:  {tmp_path / 'logs'}"


def test_an_error_that_ranks_agreed_on_is_reported_once():
    failures = [failure_of(ConfigError("no data", fix="bring some"), rank) for rank in range(4)]
    assert describe_failures(failures, 4, None) == "error: no data\n  fix:   bring some"


def test_an_error_raised_because_of_a_peers_is_a_consequence():
    wrapped = RuntimeError("training failed")
    wrapped.__cause__ = PeerFailure("rank 1 is dead")
    assert follows_from_a_peer(wrapped)
    assert not follows_from_a_peer(ValueError("mine"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_of_a_thread_is_logged_and_reported_before_the_rank_that_waited_for_it(tmp_path):
    reported = []
    log = RankLog(tmp_path, 1, reported.append)
    try:
        thread = threading.Thread(target=lambda: [][0], name="loader")
        thread.start()
        thread.join()
    finally:
        log.close()
    assert "IndexError" in log_path(tmp_path, 1).read_text()
    own = failure_of(raised(RuntimeError("no batch came")), 1)
    message = describe_failures([own, *reported], 2, None)
    assert message.startswith("error: thread 'loader' of rank 1 failed\nTraceback")
    assert (
        message.index("IndexError") < message.index("error: rank 1 failed") < message.index("no batch came")
    )


def test_empty_logs_are_removed(tmp_path):
    quiet, loud = RankLog(tmp_path / "logs", 0), RankLog(tmp_path / "logs", 1)
    loud.record_failure(raised(ValueError("mine")))
    loud.close()
    quiet.close()
    remove_empty_logs(tmp_path / "logs")
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["rank-1.log"]
    assert "ValueError: mine" in (tmp_path / "logs" / "rank-1.log").read_text()


def test_a_stop_says_what_is_lost_and_how_to_go_on(tmp_path):
    assert describe_stop([2]) == "stopped by SIGINT; no step was running, and nothing is lost"
    lost = "stopped by SIGINT, then by SIGTERM: progress since the last checkpoint is lost"
    assert describe_stop([2, 15], tmp_path) == lost
    (tmp_path / "checkpoints" / "step-00000007").mkdir(parents=True)
    assert describe_stop([2, 15], tmp_path).startswith(
        f"{lost}\n  fix:   continue from step-00000007 with --resume "
    )
