"""The file of API keys, what `ds4batch keys` makes of it, and what a running server takes from it."""

from __future__ import annotations

import concurrent.futures
import hmac
import logging
import os
import pathlib
import stat
import tempfile
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ds4batch import cli
from ds4batch.server import keys
from ds4batch.server.keys import Entry, KeyFileError, KeyInfo, Keys, Scope, digest_of, new_key, parse, read_file

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", fullmatch=True).filter(lambda name: not name.startswith(keys.PREFIX))
INFOS = st.builds(
    KeyInfo,
    NAMES,
    st.sampled_from(["user", "admin"]),
    st.integers(0, keys.MAX_CONCURRENCY),
    st.floats(1 / keys.MAX_WEIGHT, keys.MAX_WEIGHT),
)
HASH = "sha256:" + "0a" * 32


def write(path: pathlib.Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@given(st.lists(st.tuples(INFOS, st.binary(min_size=32, max_size=32)), unique_by=(lambda one: one[0].name, lambda one: one[1])))
def test_what_is_written_is_read_back(written: list[tuple[KeyInfo, bytes]]) -> None:
    entries = [Entry(info, digest) for info, digest in written]
    text = "# a comment\n\n" + "\n\n".join(entry.line for entry in entries)
    assert parse(text, "f") == entries


@given(st.text())
def test_any_text_is_read_or_refused_by_line(text: str) -> None:
    try:
        parse(text, "the file")
    except KeyFileError as error:
        number = str(error).split(":")[1]
        assert text.split("\n")[int(number) - 1].strip()


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("alice user", "expected NAME SCOPE"),
        (f"alice root {HASH}", "the scope must be user or admin"),
        (f"-alice user {HASH}", "a name is"),
        (f"{'a' * 65} user {HASH}", "a name is"),
        ("alice user sha256:0a", "the hash must be"),
        (f"alice user {HASH.upper()}", "the hash must be"),
        (f"alice user {HASH} concurrency=-1", "concurrency must be"),
        (f"alice user {HASH} concurrency=", "concurrency must be"),
        (f"alice user {HASH} weight=0", "weight must be"),
        (f"alice user {HASH} weight=nan", "weight must be"),
        (f"alice user {HASH} weight=inf", "weight must be"),
        (f"alice user {HASH} weight=1 weight=2", "weight is given twice"),
        (f"alice user {HASH} colour=red", "only concurrency=N and weight=W"),
        (f"bob user {'sha256:' + '0b' * 32}", "the name stands in the file twice"),
        (f"carol user {'sha256:' + '0c' * 32}", "the hash stands in the file twice"),
    ],
)
def test_a_bad_line_is_named_by_its_number(line: str, complaint: str) -> None:
    good = f"bob user {'sha256:' + '0c' * 32}"
    with pytest.raises(KeyFileError, match=complaint) as caught:
        parse(f"# keys\n\n{good}\n{line}\n", "/etc/keys")
    assert str(caught.value).startswith("/etc/keys:4: ")


def test_a_key_that_stands_where_it_should_not_is_not_repeated() -> None:
    key = new_key()
    shapes = ("{} user HASH", "alice {} HASH", "alice user {}", "alice user HASH {}", "alice user HASH weight={}")
    for line in (shape.format(key).replace("HASH", HASH) for shape in shapes):
        with pytest.raises(KeyFileError) as caught:
            parse(line, "f")
        assert key not in str(caught.value)


def test_keys_are_long_random_and_marked() -> None:
    made = {new_key() for _ in range(100)}
    assert len(made) == 100
    for key in made:
        assert key.startswith(keys.PREFIX)
        assert len(key) - len(keys.PREFIX) == 43  # 256 bits in base64
        assert key.isascii()


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o601, 0o666, 0o644])
def test_a_file_that_others_may_read_or_change_is_refused(tmp_path: pathlib.Path, mode: int) -> None:
    path = write(tmp_path / "keys", f"alice user {HASH}\n", mode)
    with pytest.raises(KeyFileError, match=rf"{path}: mode {mode:04o} lets others .*chmod 600"):
        Keys(path)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640])
def test_a_file_of_its_owner_or_readable_by_the_group_is_taken(tmp_path: pathlib.Path, mode: int) -> None:
    assert Keys(write(tmp_path / "keys", f"alice user {HASH}\n", mode)).names == ["alice"]


def test_a_file_of_another_user_is_refused(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "keys", f"alice user {HASH}\n")
    status = list(os.stat(path))
    status[4] = os.geteuid() + 1  # st_uid
    with pytest.raises(KeyFileError, match="belongs to another user"):
        keys.check_status(os.stat_result(status), path)


def test_what_is_no_file_of_keys_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    with pytest.raises(KeyFileError, match="No such file"):
        Keys(str(tmp_path / "none"))
    with pytest.raises(KeyFileError, match="it holds no key"):
        Keys(write(tmp_path / "empty", "# nobody\n"))
    with pytest.raises(KeyFileError, match=r"/dev/null: no regular file"):
        Keys("/dev/null")
    with pytest.raises(KeyFileError, match="Is a directory"):
        Keys(str(tmp_path))
    (tmp_path / "binary").write_bytes(b"# a\n\xff\n")
    (tmp_path / "binary").chmod(0o600)
    with pytest.raises(KeyFileError, match=r"binary:2: not UTF-8"):
        Keys(str(tmp_path / "binary"))
    with pytest.raises(KeyFileError, match="larger than"):
        Keys(write(tmp_path / "large", "#" * (1 << 20) + "\n"))
    many = "".join(f"k{i} user sha256:{i:064x}\n" for i in range(keys.MAX_KEYS + 1))
    with pytest.raises(KeyFileError, match=rf"many:{keys.MAX_KEYS + 1}: more than {keys.MAX_KEYS}"):
        Keys(write(tmp_path / "many", many))


def test_every_key_is_compared_whichever_matches(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [new_key() for _ in range(5)]
    held = Keys(write(tmp_path / "keys", "".join(f"k{i} user sha256:{digest_of(key).hex()}\n" for i, key in enumerate(made))))
    compared: list[int] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(len(a))
        return compare_digest(a, b)

    compare_digest = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", compare)
    for key, name in ((made[0], "k0"), (made[4], "k4"), (new_key(), None), ("", None), ("k\udcff", None)):
        compared.clear()
        found = held.find(key)
        assert (found and found.name) == name
        assert compared == [32] * 5
    assert held.find("x" * 100_000) is None


def change(path: str, text: str) -> None:
    """Replace a file, its time of change surely another."""
    write(pathlib.Path(path), text)
    later = time.time_ns() + 5_000_000_000
    os.utime(path, ns=(later, later))


def test_a_changed_file_is_taken_and_a_bad_one_leaves_the_keys(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first, second = new_key(), new_key()
    line = f"alice user sha256:{digest_of(first).hex()}\n"
    path = write(tmp_path / "keys", line)
    held = Keys(path)
    alice = held.find(first)
    assert alice is not None
    held.poll()
    assert not caplog.records

    change(path, line + f"bob admin sha256:{digest_of(second).hex()} concurrency=2 weight=3\n")
    held.poll()
    assert held.find(second) == KeyInfo("bob", "admin", 2, 3.0)
    assert held.holds(alice)

    for bad in ("alice\n", line.replace("user", "root")):
        caplog.clear()
        change(path, bad)
        held.poll()
        held.poll()
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert f"{path}:1: " in caplog.text
        assert held.find(second) is not None

    os.unlink(path)
    held.poll()
    assert held.find(first) is not None  # gone is not empty

    change(path, "# nobody\n")
    held.poll()
    assert held.find(first) is None
    assert not held.holds(alice)
    assert "nobody is let in" in caplog.text

    change(path, line.replace("user", "admin"))
    held.poll()
    assert held.find(first) == KeyInfo("alice", "admin")
    assert not held.holds(alice)  # who was let in as a user is another


# the tool


def run(*words: str) -> int:
    return cli.main(["keys", *words])


def test_the_tool_adds_lists_and_removes(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "keys")
    assert run("add", "--file", path, "alice", "--concurrency", "2", "--weight", "0.5") == 0
    alice = capsys.readouterr()
    assert "not shown again" in alice.err
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert run("add", "--file", path, "ops", "--scope", "admin") == 0
    ops = capsys.readouterr().out.strip()

    held = Keys(path)
    assert held.find(alice.out.strip()) == KeyInfo("alice", "user", 2, 0.5)
    assert held.find(ops) == KeyInfo("ops", "admin")
    assert alice.out.strip() not in pathlib.Path(path).read_text()

    assert run("list", "--file", path) == 0
    listed = capsys.readouterr().out
    assert [line.split()[:2] for line in listed.splitlines()] == [["alice", "user"], ["ops", "admin"]]
    assert "sha256" not in listed
    assert ops not in listed

    assert run("remove", "--file", path, "alice") == 0
    held.poll()
    assert held.names == ["ops"]
    assert held.find(ops) is not None


def test_the_tool_keeps_comments_owner_and_mode(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "keys", f"# the team\nalice user {HASH}\n\n# machines\nci user sha256:{'1' * 64}", 0o640)
    link = tmp_path / "link"
    link.symlink_to(path)
    assert run("add", "--file", str(link), "bob") == 0
    assert run("remove", "--file", path, "alice") == 0
    lines = pathlib.Path(path).read_text().splitlines()
    assert lines[:4] == ["# the team", "", "# machines", f"ci user sha256:{'1' * 64}"]
    assert lines[4].startswith("bob user sha256:")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o640
    assert link.is_symlink()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("add", "alice"), "alice has a key already"),
        (("remove", "bob"), "no key of that name"),
    ],
)
def test_the_tool_refuses_what_makes_no_sense(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], complaint: str
) -> None:
    path = write(tmp_path / "keys", f"alice user {HASH}\n")
    before = pathlib.Path(path).read_bytes()
    assert run(words[0], "--file", path, *words[1:]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert complaint in err
    assert pathlib.Path(path).read_bytes() == before
    assert os.listdir(tmp_path) == ["keys"]


@pytest.mark.parametrize("words", [("add", "a b"), ("add", "x", "--weight", "0"), ("add", "x", "--concurrency", "many"), ("show",)])
def test_a_wrong_command_line_is_status_2(tmp_path: pathlib.Path, words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as left:
        run(words[0], "--file", str(tmp_path / "keys"), *words[1:])
    assert left.value.code == 2
    assert not os.listdir(tmp_path)


def test_the_tool_touches_no_file_that_others_can_read(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "keys", f"alice user {HASH}\n", 0o644)
    assert run("add", "--file", path, "bob") == 1
    assert "chmod 600" in capsys.readouterr().err
    assert run("list", "--file", str(tmp_path / "none")) == 1
    assert run("add", "--file", str(tmp_path / "no" / "folder"), "bob") == 1


def test_keys_that_are_added_at_once_are_all_there(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "keys")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        codes = list(pool.map(lambda i: run("add", "--file", path, f"k{i}"), range(24)))
    assert codes == [0] * 24
    assert {entry.info.name for entry in read_file(path)} == {f"k{i}" for i in range(24)}
    assert os.listdir(tmp_path) == ["keys"]


class Reloading(RuleBasedStateMachine):
    """Against a file that is written well, written badly, removed and put back, the server holds what the last good one held."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = pathlib.Path(self.folder.name, "keys")
        self.made = [new_key() for _ in range(4)]
        self.time = 10**18
        self.holds = {0: KeyInfo("k0")}
        self.put(self.spelled(self.holds), 0o600)
        self.keys = Keys(str(self.path))

    def teardown(self) -> None:
        self.folder.cleanup()

    def spelled(self, infos: dict[int, KeyInfo]) -> str:
        return "".join(Entry(info, digest_of(self.made[i])).line + "\n" for i, info in infos.items())

    def put(self, text: str, mode: int) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text(text)
        fresh.chmod(mode)
        self.time += 10**9
        os.utime(fresh, ns=(self.time, self.time))
        fresh.replace(self.path)

    @rule(chosen=st.dictionaries(st.integers(0, 3), st.sampled_from(["user", "admin"])), mode=st.sampled_from([0o600, 0o640, 0o400]))
    def write(self, chosen: dict[int, Scope], mode: int) -> None:
        self.holds = {i: KeyInfo(f"k{i}", scope) for i, scope in chosen.items()}
        self.put(self.spelled(self.holds), mode)
        self.keys.poll()

    @rule(text=st.sampled_from(["k0 user\n", "k0 root x\n", "\x00", "k0 user sha256:\n"]))
    def spoil(self, text: str) -> None:
        self.put(self.spelled(self.holds) + text, 0o600)
        self.keys.poll()

    @rule(mode=st.sampled_from([0o644, 0o660, 0o666]))
    def open_up(self, mode: int) -> None:
        self.put(self.spelled({i: KeyInfo(f"k{i}", "admin") for i in range(4)}), mode)
        self.keys.poll()

    @rule()
    def take_away(self) -> None:
        self.path.unlink(missing_ok=True)
        self.keys.poll()

    @rule()
    def look(self) -> None:
        self.keys.poll()

    @invariant()
    def who_is_let_in_is_who_the_last_good_file_named(self) -> None:
        assert {i: info for i, key in enumerate(self.made) if (info := self.keys.find(key)) is not None} == self.holds
        assert all(self.keys.holds(info) for info in self.holds.values())


TestReloading = Reloading.TestCase
TestReloading.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
