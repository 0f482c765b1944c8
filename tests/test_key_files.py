"""Keys: how they are made and kept."""

import os
import stat
from pathlib import Path

import pytest

from test_keys import keys
from tianji_jax.cli import main
from tianji_jax.transport import KeyFileError, load_client_keys, load_server_keys, make_keys

__all__ = ["keys"]  # the fixture


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_keys_are_made_for_their_owner_only_and_never_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "keys"
    before = os.umask(0o000)
    try:
        assert main(["keys", "new", str(folder)]) == 0
    finally:
        assert os.umask(before) == 0o000
    told = capsys.readouterr().out
    assert "learner.key_secret" in told
    assert "actor's host gets learner.key and actor.key_secret" in told
    names = {"learner.key", "learner.key_secret", "actor.key", "actor.key_secret"}
    assert {path.name for path in folder.iterdir()} == names
    assert mode(folder) == 0o700
    assert {mode(path) for path in folder.iterdir()} == {0o600}
    contents = {path: path.read_bytes() for path in folder.iterdir()}
    assert main(["keys", "new", str(folder)]) == 2
    assert "not overwritten" in capsys.readouterr().err
    assert main(["keys", "new", str(folder), "--actor", "second"]) == 0
    assert "second.key_secret" in capsys.readouterr().out
    assert main(["keys", "new", str(folder), "--actor", "second"]) == 2
    assert {path: path.read_bytes() for path in contents} == contents
    assert len(load_server_keys(folder).clients) == 2
    assert load_client_keys(folder).server == load_server_keys(folder).public


@pytest.mark.parametrize("name", ["learner", "../actor", "", ".hidden", "a/b", "-x"])
def test_names_that_will_not_do_are_refused(name: str, keys: Path) -> None:
    with pytest.raises(KeyFileError, match="name"):
        make_keys(keys, name)


def test_folders_that_will_not_do_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"no learner\.key: begin with"):
        make_keys(tmp_path / "none", "second")
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(KeyFileError, match=r"mode 755\): chmod 700 .*open"):
        make_keys(tmp_path / "open")
    assert list((tmp_path / "open").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(KeyFileError, match=r"cannot write to .*file"):
        make_keys(tmp_path / "file")


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o660, 0o610])
def test_a_secret_that_others_can_read_is_not_used(bits: int, keys: Path) -> None:
    for name, load in [("learner", load_server_keys), ("actor", load_client_keys)]:
        secret = keys / f"{name}.key_secret"
        secret.chmod(bits)
        with pytest.raises(KeyFileError, match=rf"{name}\.key_secret .*mode {bits:o}\): chmod 600 .*{name}"):
            load(keys)
        secret.chmod(0o600)
        load(keys)


@pytest.mark.parametrize(
    "text", ["", "public-key = 'short'", f"public-key = '{'~' * 40}'", f"public-key = '{'#' * 40}'"]
)
def test_files_that_hold_no_keys_are_refused(text: str, keys: Path) -> None:
    for name, load in [("actor.key", load_server_keys), ("learner.key", load_client_keys)]:
        content = (keys / name).read_text()
        (keys / name).write_text(text)
        with pytest.raises(KeyFileError, match=name):
            load(keys)
        (keys / name).write_text(content)
    (keys / "learner.key_secret").write_text((keys / "learner.key").read_text())
    with pytest.raises(KeyFileError, match="pair"):
        load_server_keys(keys)


def test_missing_keys_are_named(keys: Path) -> None:
    (keys / "actor.key").unlink()
    with pytest.raises(KeyFileError, match="no actor's public key"):
        load_server_keys(keys)
    (keys / "learner.key").unlink()
    with pytest.raises(KeyFileError, match=r"no .*learner\.key.*tianji keys new"):
        load_client_keys(keys)
    (keys / "actor.key_secret").unlink()
    with pytest.raises(KeyFileError, match="no actor's secret key"):
        load_client_keys(keys)


def test_secrets_are_not_printed(keys: Path) -> None:
    for loaded in (load_server_keys(keys), load_client_keys(keys)):
        assert loaded.secret.decode() not in repr(loaded)
