"""Every command on a store in every state: the exit code, one clear line, and JSON that is valid."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import calibrated
import numpy as np
import pytest
from click.testing import Result
from clistores import STATES, TOKENS, held, make_stores
from small_stores import LAYOUT, config, identity, kv_of, put, tokens_of
from typer.testing import CliRunner

import kvstore
from kvstore import KVStore, ModelIdentity, StoreLocked
from kvstore.cli import app, look, main
from kvstore.cli.errors import DAMAGED, FAILED, FOREIGN, LOCKED, MISSING, OK, USAGE
from kvstore.tiers.disk.fs import FileSystem

# name: (arguments, whether it opens the store for writing, codes that differ from those of its kind)
EMPTY_FAILS = {"empty": FAILED}
ANOTHER_MODEL = dict.fromkeys(("empty", "healthy", "damaged", "unreadable"), FOREIGN) | {"missing": OK, "other": OK}
BESIDE = {"locked": OK, "foreign": OK, "other": OK}  # what only uses the folder
SMALL = ("--tokens", "64", "--layers", "1", "--sequences", "1", "--codec", "raw")
COMMANDS: dict[str, tuple[list[str], bool, dict[str, int]]] = {
    "ls": (["ls", "STORE"], False, {}),
    "inspect": (["inspect", "STORE"], False, {}),
    "explain": (["explain", "STORE", "--tokens", TOKENS], False, {}),
    "stats": (["stats", "STORE"], False, {}),
    "stats --watch": (["stats", "STORE", "--watch", "0.001", "--count", "1"], False, {}),
    "report": (["report", "STORE", "--out", "FILE"], False, {}),
    "check": (["check", "STORE"], False, {}),
    "verify": (["verify", "STORE"], False, {"damaged": DAMAGED}),
    "gc": (["gc", "STORE"], True, {}),
    "compact": (["compact", "STORE"], True, {}),
    "evict": (["evict", "STORE", "--to", "3MiB"], True, {}),
    "erase, only said": (["erase", "STORE", "--tokens", TOKENS], False, {}),
    "erase": (["erase", "STORE", "--tokens", TOKENS, "--yes"], True, {}),
    "erase session": (["erase", "STORE", "--session", "alice", "--yes"], True, {}),
    "erase namespace": (["erase", "STORE", "--namespace", "apart", "--whole-namespace", "--yes"], True, {}),
    "learn": (["learn", "STORE"], True, {}),
    "sessions ls": (["sessions", "ls", "STORE"], False, {}),
    "sessions show": (["sessions", "show", "STORE", "alice"], False, EMPTY_FAILS),
    "sessions fork": (["sessions", "fork", "STORE", "alice", "bob"], True, EMPTY_FAILS | {"unreadable": FAILED}),
    "sessions rm": (["sessions", "rm", "STORE", "alice"], True, EMPTY_FAILS | {"unreadable": FAILED}),
    "export": (["export", "STORE", "FILE"], False, {"damaged": DAMAGED}),
    "export session": (["export", "STORE", "FILE", "--session", "alice"], False, EMPTY_FAILS | {"damaged": DAMAGED}),
    "import": (["import", "STORE", "BUNDLE"], True, {"missing": OK, "other": OK}),
    "import, another model's": (["import", "STORE", "THEIRS"], True, ANOTHER_MODEL),
    "backup": (["backup", "STORE", "FOLDER"], False, {"damaged": DAMAGED}),
    "backup, another model's": (
        ["backup", "STORE", "ANOTHER"],
        False,
        dict.fromkeys(("empty", "healthy", "damaged", "locked"), FOREIGN),
    ),
    "warmup": (["warmup", "STORE", "--model", "MODEL", "--prompts", "PROMPTS"], True, ANOTHER_MODEL),
    "bench": (["bench", "--path", "STORE", *SMALL], True, BESIDE | {"missing": FAILED}),
    "doctor": (["doctor", "--store", "STORE"], False, {"unreadable": OK}),
    "doctor --path": (["doctor", "--path", "STORE"], True, BESIDE | {"missing": FAILED}),
}
READING = {"unreadable": DAMAGED, "foreign": FOREIGN, "other": MISSING, "missing": MISSING}
WRITING = {"locked": LOCKED, "foreign": FOREIGN, "other": MISSING, "missing": MISSING}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("stores")
    make_stores(folder)
    calibrated.checkpoint(folder / "model")
    (folder / "prompts").write_text("a prompt\n")
    with KVStore(folder / "another", ModelIdentity("another", "1", "", "", LAYOUT), config()) as store:
        put(store, tokens_of(1, 8))
    done = run("export", str(folder / "another"), str(folder / "theirs"))
    assert done.exit_code == OK, done.output
    done = run("export", str(folder / "healthy"), str(folder / "bundle"))
    assert done.exit_code == OK, done.output
    with held(folder / "locked"):
        yield folder


def run(*arguments: str) -> Result:
    """The command, in this process; a bug keeps its traceback."""
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "150"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def expected(command: str, state: str) -> int:
    _, writes, other = COMMANDS[command]
    return other.get(state, (WRITING if writes else READING).get(state, OK))


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_on_every_store(command: str, state: str, made: Path, tmp_path: Path) -> None:
    arguments, writes, _ = COMMANDS[command]
    store = made / state
    if writes and state != "locked" and store.exists():
        store = shutil.copytree(store, tmp_path / "store")
    elif writes and state == "missing":
        store = tmp_path / "missing"
    places = {"STORE": store, "FILE": tmp_path / "file", "FOLDER": tmp_path / "folder"}
    places |= {name.upper(): made / name for name in ("bundle", "theirs", "another", "model", "prompts")}
    given = [str(places.get(word, word)) for word in arguments]
    code = expected(command, state)
    as_json = run(*given, "--json")
    document = json.loads(as_json.stdout)
    assert as_json.exit_code == code, as_json.output
    assert "error" not in document or document["exit_code"] == code
    if "error" in document:
        told = run(*given)
        assert told.exit_code == code
        assert told.stdout == ""
        assert told.stderr.count("\n") == 1
        assert told.stderr.startswith("error: ")
        assert document["error"] in told.stderr
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"store", "missing", "file", "folder"}, "work folders are removed"


def test_every_command_is_in_the_table() -> None:
    """`calibrate` and the commands of `remote` take no store, and have tests of their own."""
    there = {(command.name or command.callback.__name__) for command in app.registered_commands if command.callback}
    groups = {group.name: group.typer_instance for group in app.registered_groups}
    assert set(groups) == {"sessions", "remote"}
    assert groups["sessions"] is not None
    for command in groups["sessions"].registered_commands:
        assert command.callback is not None
        there.add(f"sessions {command.name or command.callback.__name__}")
    assert {name.rstrip("_") for name in there} <= set(COMMANDS) | {"calibrate"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "STORE"], "name the sequence with one of --tokens, --tokens-file or --text"),
        (["explain", "STORE", "--tokens", "a"], "expected numbers of 0 to 2^32 - 1 with commas or spaces"),
        (["explain", "STORE", "--tokens", ""], "expected at least one token"),
        (["explain", "STORE", "--tokens", "4294967296"], "expected ids from 0 to 2^32 - 1"),
        (["explain", "STORE", "--tokens", "1" * 5000], "expected numbers"),
        (["explain", "STORE", "--tokens-file", "BINARY"], "is not UTF-8"),
        (["explain", "STORE", "--text", "a"], "--text: needs --tokenizer"),
        (["explain", "STORE", "--text", "a", "--tokenizer", "nowhere"], "nowhere: no tokenizer can be loaded"),
        (["evict", "STORE", "--to", "much"], "'much' is no size"),
        (["evict", "STORE", "--to", "4KiB"], "--to: 4096 is below"),
        (["erase", "STORE"], "name one of a sequence"),
        (["erase", "STORE", "--whole-namespace"], "name it with --namespace"),
        (["ls", "STORE", "--namespace", "digest:00"], "64 hexadecimal digits"),
        (["ls", "STORE", "--namespace", "digest:" + "z" * 64], "64 hexadecimal digits"),
        (["sessions", "show", "STORE", "nobody"], "session 'nobody' does not exist"),
        (["export", "STORE", "FILE", "--session", "nobody"], "session 'nobody' does not exist"),
        (["report", "STORE", "--out", "nowhere/x.html"], "nowhere: there is no such folder; make it first"),
        (["export", "STORE", "nowhere/file"], "there is no such folder"),
        (["export", "STORE", "FILE", "--prefix", "a"], "expected numbers"),
        (["export", "STORE", "STORE/file"], "is in the store"),
        (["backup", "STORE", "STORE"], "is the store itself or in it"),
        (["import", "STORE", "nowhere"], "No such file"),
        (["bench", "--path", "nowhere"], "nowhere is no folder"),
        (["doctor", "--path", "nowhere"], "is no folder"),
        (["doctor", "--config", "nowhere"], "cannot be read as TOML"),
        (["doctor", "--model", "nowhere"], "no model's config can be loaded"),
        (["doctor", "--model", "BROKEN"], "no model's config can be loaded"),
        (["bench", "--tokens", "1000000000", "--sequences", "1000", "--layers", "1000"], "memory ran out"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments: list[str], message: str, made: Path, tmp_path: Path) -> None:
    places = {name: tmp_path / name.lower() for name in ("FILE", "BINARY", "BROKEN")}
    places |= {"STORE": made / "healthy", "STORE/file": made / "healthy" / "file"}
    places["BINARY"].write_bytes(b"\xff\xfe")
    places["BROKEN"].mkdir()
    (places["BROKEN"] / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    done = run(*(str(places.get(word, word)) for word in arguments))
    assert done.exit_code == FAILED, done.output
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], None),
        (["nothing"], "No such command 'nothing'"),
        (["ls"], "Missing argument 'STORE'; `"),
        (["ls", "STORE", "--nothing"], "No such option: --nothing; `"),
        (["ls", "STORE", "--limit", "-1"], "Invalid value for '--limit'"),
        (["inspect", "STORE", "--top", "many"], "Invalid value for '--top'"),
        (["stats", "STORE", "--watch", "-1"], "Invalid value for '--watch'"),
        (["sessions", "nothing"], "No such command 'nothing'"),
        (["sessions", "show", "STORE"], "Missing argument"),
    ],
)
def test_wrong_options_are_told_in_one_line(arguments: list[str], message: str | None) -> None:
    done = run(*arguments)
    assert done.exit_code == USAGE
    if message is None:
        assert done.stderr.startswith("Usage: ")
        return
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    document = json.loads(run(*arguments, "--json").stdout)
    assert (document["kind"], document["exit_code"]) == ("UsageError", USAGE)
    assert message in document["error"]


def test_what_cannot_be_printed_is_told(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_document: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvstore.cli.look.print_json", full)
    done = run("ls", str(made / "healthy"), "--json")
    assert done.exit_code == FAILED
    assert done.stderr == "error: the output cannot be written: No space left on device\n"


def test_a_full_disk_is_told_with_its_folder_and_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_fs: FileSystem, _fd: int, _nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FileSystem, "allocate", full)
    done = run("doctor", "--path", str(tmp_path))
    assert done.exit_code == FAILED
    assert f"error: path: {tmp_path}: No space left on device; the disk is measured with a file of 64" in done.stderr
    assert "are free: free space, or name a folder on another disk" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_namespace_without_anything_is_told(made: Path) -> None:
    store = str(made / "healthy")
    nothing = "the store has nothing in the namespace 'nosuch'; `kvstore inspect` lists the namespaces it has\n"
    listed = run("ls", store, "--namespace", "nosuch")
    erased = run("erase", store, "--whole-namespace", "--namespace", "nosuch")
    assert (listed.exit_code, listed.stdout) == (OK, nothing + "0 sequences\n")
    assert (erased.exit_code, erased.stdout) == (OK, nothing)
    assert "would be erased" in run("erase", store, "--whole-namespace", "--namespace", "apart").stdout


def test_beginnings_are_shown_as_text_that_cannot_steer_the_terminal(tmp_path: Path) -> None:
    calibrated.tokenizer().save_pretrained(tmp_path / "words")
    words, texts = ["--tokenizer", str(tmp_path / "words")], ("a harbour\n\x1b[31m" + "!" * 200, "a harbour, too")
    with KVStore(tmp_path / "store", identity(), config()) as store:
        for text in texts:
            ids = calibrated.tokenizer()(text).input_ids
            store.put(ids, kv_of(ids))
    listed = run("ls", str(tmp_path / "store"), *words).stdout
    assert "… \\n\\x1b[31m!!!" in listed  # they share what comes before
    assert "… , too" in listed
    assert "\x1b" not in listed
    assert max(map(len, listed.splitlines())) <= 150
    rows = json.loads(run("ls", str(tmp_path / "store"), *words, "--json").stdout)["sequences"]
    assert [row["text"] for row in rows] == [texts[0][:64], texts[1]]
    assert [(row["parts_at"], row["parts"]) for row in rows] == [(9, texts[0][9:73]), (9, texts[1][9:])]
    shown = run("inspect", str(tmp_path / "store"), *words).stdout
    assert "\nshared beginnings\n-----------------\n" in shown
    assert "\nlayout\n------\nlayers" in shown
    assert "a harbou" in shown.rpartition("shared beginnings")[2]


def test_where_a_sequence_parts_from_all_others() -> None:
    listed = [np.array(ids, np.uint32) for ids in ([1, 2, 3, 4], [1, 2, 5], [1, 2, 3], [9], [1, 2, 5, 7, 7], [300, 1])]
    assert look._partings(listed) == ([3, 2, 2, 0, 3, 0], 0)
    assert look._partings(listed[:3]) == ([3, 2, 2], 2)
    assert look._partings(listed[:1]) == ([0], 4)
    assert look._partings([]) == ([], 0)


def test_texts_that_end_alike_are_told_apart_by_what_parts_them_before(tmp_path: Path) -> None:
    calibrated.tokenizer().save_pretrained(tmp_path / "words")
    with KVStore(tmp_path / "store", identity(), config()) as store:
        for text in (f"Be kind. {about} is a long story. What {what}?" for about in ("Ann", "Bob") for what in "xy"):
            ids = calibrated.tokenizer()(text).input_ids
            store.put(ids, kv_of(ids))
    listed = run("ls", str(tmp_path / "store"), "--tokenizer", str(tmp_path / "words"), "--json").stdout
    shown = {look._shown_text(row) for row in json.loads(listed)["sequences"]}
    assert shown == {f"… {about} is a long story. Wha … {what}?" for about in ("Ann", "Bob") for what in "xy"}


def test_who_has_the_store_locked_is_told_for_the_shell(made: Path) -> None:
    done = run("gc", str(made / "locked"))
    assert done.exit_code == LOCKED
    assert "; end that program, or use a command that only reads, such as ls" in done.stderr
    assert "KVStore" not in done.stderr
    with pytest.raises(StoreLocked, match="SharedKVStore"):
        KVStore(made / "locked", identity(), config())


def test_completion_finds_what_is_public() -> None:
    assert {"KVStore", "attach", "errors"} <= set(dir(kvstore))
    assert {"generate", "warmup"} <= set(dir(kvstore.integrations.transformers))


def test_the_version_is_printed_without_torch() -> None:
    code = (
        "import sys; from kvstore.cli import main\ntry: main(['--version'])\nfinally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"kvstore {kvstore.__version__}\n" == run("--version").stdout
    as_module = subprocess.run(
        [sys.executable, "-m", "kvstore", "--version"], capture_output=True, text=True, check=True
    )
    assert as_module.stdout == done.stdout


def test_names_cannot_steer_the_terminal(tmp_path: Path) -> None:
    name = "a\nb\x1b[31m"
    with KVStore(tmp_path / "store", identity(), config()) as store:
        store.session(name).save(tokens_of(1, 8), kv_of(tokens_of(1, 8)))
    done = run("sessions", "ls", str(tmp_path / "store"))
    assert "a\\nb\\x1b[31m" in done.stdout
    assert "\x1b" not in done.stdout
    rows = json.loads(run("sessions", "ls", str(tmp_path / "store"), "--json").stdout)["sessions"]
    assert [row["id"] for row in rows] == [name]


def test_sessions_are_shown_with_all_that_is_known_of_them(tmp_path: Path) -> None:
    with KVStore(tmp_path / "store", identity(), config()) as store:
        ids = tokens_of(1, 8)
        store.session("alice", namespace="n").save(ids, kv_of(ids), ttl=500, metadata={"user": "ann", "raw": b"\0"})
        store.session("alice", namespace="n").resume()
    (row,) = json.loads(run("sessions", "ls", str(tmp_path / "store"), "--json").stdout)["sessions"]
    assert (row["id"], row["tokens"], row["stored_tokens"], row["hits"]) == ("alice", 8, 8, 1)
    assert row["metadata"] == {"user": "ann", "raw": "b'\\x00'"}
    assert row["created"] <= row["last_use"] < row["expires"] < row["created"] + 501
    assert row["stored_bytes"] > 0
    assert row["namespace"].startswith("digest:")
    shown = json.loads(run("sessions", "show", str(tmp_path / "store"), "alice", "--namespace", "n", "--json").stdout)
    assert {name: shown[name] for name in row} == row
    assert "resumes" in run("sessions", "ls", str(tmp_path / "store")).stdout
    text = run("sessions", "show", str(tmp_path / "store"), "alice", "--namespace", "n").stdout
    assert '{"user": "ann"' in text.replace("\n", " ")


def test_the_commands_without_a_store_print_json(tmp_path: Path) -> None:
    done = run("bench", "--path", str(tmp_path), "--tokens", "64", "--layers", "1", "--sequences", "1", "--json")
    rows = json.loads(done.stdout)["rows"]
    assert [row["codec"] for row in rows] == ["raw", "splitzip", "entropy"]
    assert all(row["disk_bytes_per_s"] > 0 for row in rows)
    found = json.loads(run("doctor", "--path", str(tmp_path), "--json").stdout)
    assert found["machine"]["cores"] >= 1
    assert found["disk"]["write_bytes_per_s"] > 0
    assert {codec["name"] for codec in found["codecs"]} >= {"raw", "splitzip", "entropy"}
    assert not list(tmp_path.iterdir())


def test_without_typer_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("kvstore.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as ended:
        main(["ls", "nowhere"])
    assert ended.value.code == FAILED
    assert capsys.readouterr().err == "error: the command needs typer; pip install 'kvstore-lm[cli]'\n"


def test_a_namespace_that_is_not_text_is_one_line(tmp_path: Path) -> None:
    KVStore(tmp_path / "s", identity(), config()).close()
    done = run("ls", str(tmp_path / "s"), "--namespace", "bad\udcff")
    assert (done.exit_code, done.exception is None or isinstance(done.exception, SystemExit)) == (FAILED, True)
    assert "UTF-8" in done.output


def test_nobody_reads_what_is_printed(tmp_path: Path) -> None:
    code = "import sys; sys.stdout = None; from kvstore.cli import main; main(['ls', sys.argv[1], '--json'])"
    KVStore(tmp_path / "s", identity(), config()).close()
    command = [sys.executable, "-c", code, str(tmp_path / "s")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
