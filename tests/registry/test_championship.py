"""Who is champion, from any snapshot: pure, so thousands of histories are tried."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from registry.versions import LAST, Event, Snapshot, read_snapshot, resolve, withdrawn


class Model:
    """A registered model in memory, with the protocol's writes one by one."""

    def __init__(self, versions: int) -> None:
        self.versions = {str(number) for number in range(1, versions + 1)}
        self.alias: str | None = None
        self.events: dict[int, Event] = {}
        self.last = 0

    def snapshot(self) -> Snapshot:
        return Snapshot(
            {"champion": self.alias} if self.alias else {}, set(self.versions), dict(self.events), self.last
        )

    def repair(self) -> None:
        state = resolve(self.snapshot())
        self.events = {number: event for number, event in self.events.items() if number <= state.sequence}
        number = state.sequence
        if state.outside and state.champion is not None:
            number += 1
            self.events[number] = Event(number, "outside", state.champion, None, state.line, "", "", "")
        self.alias, self.last = state.champion, number

    def change(self, action: str, target: str, writes: int) -> None:
        """Promote or roll back, dying after so many writes: 0 nothing, 1 intent, 2 commit, 3 all."""
        self.repair()
        state = resolve(self.snapshot())
        if action == "rollback":
            if not state.line:
                return
            target, line = state.line[-1], state.line[:-1]
        else:
            if target == state.champion or target not in self.versions:
                return
            line = (*state.line, state.champion) if state.champion else ()
        if writes > 0:
            number = state.sequence + 1
            self.events[number] = Event(number, action, target, state.champion, line, "", "", "")
        if writes > 1:
            self.alias = target
        if writes > 2:
            self.repair()


steps = st.tuples(st.sampled_from(["promote", "rollback"]), st.sampled_from("12345"), st.integers(0, 3))
hands = st.tuples(st.sampled_from(["move", "drop", "delete"]), st.sampled_from("12345"), st.just(0))


@given(st.lists(steps, max_size=25))
def test_the_line_is_a_stack_whatever_dies(actions):
    model, stack = Model(5), []
    for action, target, writes in actions:
        before = list(stack)
        if action == "rollback":
            if len(stack) > 1 and writes > 1:
                stack.pop()
        elif (not stack or stack[-1] != target) and writes > 1:
            stack.append(target)
        model.change(action, target, writes)
        state = resolve(model.snapshot())
        assert [*state.line, *([state.champion] if state.champion else [])] == stack, before


@given(st.lists(st.one_of(steps, hands), max_size=25))
def test_repair_always_ends_with_one_existing_champion(actions):
    model, had = Model(5), False
    for action, target, writes in actions:
        if action == "move" and target in model.versions:
            model.alias = target
        elif action == "drop":
            model.alias = None
        elif action == "delete" and len(model.versions) > 1:
            model.versions.discard(target)
            model.alias = None if model.alias == target else model.alias
        elif action in ("promote", "rollback"):
            model.change(action, target, writes)
        model.repair()
        state = resolve(model.snapshot())
        assert not state.outside
        assert state.champion == model.alias
        had = had or state.champion is not None
        if state.champion is not None:
            assert {state.champion, *state.line} <= model.versions
            whole = [*state.line, state.champion]
            assert all(digest != other for digest, other in pairwise(whole))
        once = (model.alias, dict(model.events), model.last)
        model.repair()
        assert once == (model.alias, dict(model.events), model.last)
        assert sorted(model.events) == list(range(1, model.last + 1))


def test_events_survive_their_tags():
    event = Event(3, "promote", "2", "1", ("1",), "ada", "better", "now")
    assert read_snapshot({}, set(), {event.key: event.to_json(), "other": "x"}).events == {3: event}


def test_of_two_events_of_one_number_the_committed_one_counts():
    won, lost = (Event(2, "promote", version, "1", ("1",), "", "", "", version * 2) for version in "34")
    tags = {challenge.key: challenge.to_json() for challenge in (won, lost)}
    assert len(tags) == 2
    for model in (
        read_snapshot({"champion": "3"}, {"1", "3", "4"}, {**tags, LAST: "1"}),  # it moved the alias
        read_snapshot({"champion": "4"}, {"1", "3", "4"}, {**tags, LAST: won.last}),  # the other one did, too late
    ):
        assert (model.events, model.losers) == ({2: won}, (lost.key,))
    assert resolve(model).outside


def test_withdrawn_until_promoted_again():
    first = Event(1, "promote", "1", None, (), "", "", "")
    events = [first, Event(2, "promote", "2", "1", ("1",), "", "", ""), Event(3, "rollback", "1", "2", (), "", "", "")]
    table = {event.sequence: event for event in events}
    assert withdrawn(table, "2")
    assert not withdrawn(table, "1")
    assert not withdrawn(table | {4: Event(4, "force", "2", "1", ("1",), "", "", "")}, "2")
