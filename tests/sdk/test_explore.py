"""Checklist G, 90 to 94: `explore` of the published Python client."""

import time
from collections.abc import Callable

import pytest
from pandastack import Candidate, Client, Sandbox, ServerError
from pandastack import explore as explore_module
from pandastack.explore import ExploreError

from harness.poll import holds, until
from harness.recorder import recorded
from harness.server import Server

#: What an explored child may outlive its TTL by: an interval of the reaper, and its deletion.
REAPER = 5 + 5


def test_90_the_best_branch_wins_and_losers_are_reaped(
    server: Server, sandbox: Sandbox, delete_after: Callable
) -> None:
    before = server.ids()
    with recorded() as sent:
        result = sandbox.explore(
            ["exit 1", "sleep 0.1; echo PASS; touch /root/f", "sleep 1"],
            score_fn=lambda _, outcome: float("PASS" in outcome.stdout_tail),
        )
    assert result.winner is not None
    delete_after(result.winner.id)
    assert result.winner_outcome.label == "sleep 0.1; echo PASS; touch /root/f"
    assert result.winner_outcome.files_changed == ["/root/f"]
    assert result.errors == [] and result.reap_failures == {}
    assert len(result.reaped) == 2
    assert [path.rsplit("/", 1)[1] for method, path in sent if method == "POST"].count("promote") == 1
    assert [one for one in sent if one[0] == "DELETE"] == []
    assert server.ids() == before | {result.winner.id}
    assert result.winner.exec("ls /root/f").exit_code == 0
    assert sandbox.exec("ls /root/f").exit_code != 0


def test_90_candidates_see_the_parents_memory_and_env_and_timeouts_are_theirs(
    sandbox: Sandbox, delete_after: Callable
) -> None:
    sandbox.exec("echo from-the-parent >/dev/shm/x")
    result = sandbox.explore(
        [
            Candidate(
                "memory",
                'printenv WHO | grep -qx "it\'s me" && grep -q from-the-parent /dev/shm/x',
                env={"WHO": "it's me"},
            ),
            Candidate("slow", "sleep 30", timeout_s=1),
            Candidate.call("calls", lambda branch: branch.exec("cat /dev/shm/x").stdout.strip(), score=0.5),
        ]
    )
    delete_after(result.winner.id)
    outcomes = {outcome.label: outcome for outcome in result.outcomes}
    assert result.winner_outcome.label == "memory"
    assert outcomes["slow"].timed_out and not outcomes["slow"].ok
    assert outcomes["calls"].value == "from-the-parent"


def test_91_without_a_viable_branch_all_children_are_gone(server: Server, sandbox: Sandbox) -> None:
    before = server.ids()
    with pytest.raises(ExploreError, match="no viable branch"):
        sandbox.explore(["false", "exit 3"])
    assert server.ids() == before


@pytest.mark.parametrize("count", [0, 17])
def test_92_no_or_too_many_candidates_send_nothing(sandbox: Sandbox, count: int) -> None:
    with recorded() as sent, pytest.raises(ExploreError):
        sandbox.explore(["true"] * count)
    assert sent == []


@pytest.mark.slow
def test_93_abandoned_children_end_with_their_explore_ttl_and_a_promoted_one_outlives_it(
    server: Server, client: Client, sandbox: Sandbox, delete_after: Callable
) -> None:
    ttl = 3
    metadata = {"explore": "1", "explore_ttl": str(ttl)}
    # As a client does that is killed right after its fork.
    abandoned = sandbox.fork_tree(2, metadata=metadata)
    winner, _ = sandbox.fork_tree(2, metadata=metadata)
    delete_after(winner.id)
    assert abandoned[0].lifecycle()["ttl_seconds"] == ttl
    winner.promote(cleanup_siblings=True)
    assert winner.lifecycle()["ttl_seconds"] > ttl
    started = time.monotonic()
    expected = {sandbox.id, winner.id}
    lost = {child.id for child in abandoned}
    until("the abandoned children are reaped", lambda: not lost & server.ids(), ttl + REAPER)
    holds("the winner lives on", lambda: expected <= server.ids(), max(0.5, 2 * ttl - (time.monotonic() - started)))
    assert winner.exec("echo alive").stdout == "alive\n"
    assert "explore_ttl" not in winner.refresh().metadata


def test_93_an_explore_ttl_that_is_no_ttl_is_refused(server: Server, sandbox: Sandbox) -> None:
    before = server.ids()
    for bad in ("0", "-1", "soon", ""):
        with pytest.raises(Exception, match="explore_ttl"):
            sandbox.fork_tree(2, metadata={"explore_ttl": bad})
    assert server.ids() == before


def test_94_without_room_for_a_single_child_it_is_a_refusal(own_server: Server) -> None:
    own_server.stop()
    own_server.arguments += ["--max-sandboxes", "2"]
    own_server.start()
    client = own_server.client()
    parent, other = (client.sandboxes.create(template="base") for _ in range(2))
    for refused in (
        lambda: parent.fork_tree(1),
        lambda: parent.fork(),
        lambda: client.sandboxes.create(template="base"),
    ):
        with pytest.raises(ServerError, match="at most 2 sandboxes"):
            refused()
    assert own_server.ids() == {parent.id, other.id}
    assert parent.exec("echo unharmed").stdout == "unharmed\n"
    # Once there is room the same call works.
    other.kill()
    (child,) = parent.fork_tree(1)
    assert child.exec("echo child").stdout == "child\n"


def test_the_module_function_is_the_method(sandbox: Sandbox, delete_after: Callable) -> None:
    result = explore_module(sandbox, ["true"], capture_files=False)
    delete_after(result.winner.id)
    assert result.table()
