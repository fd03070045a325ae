"""RUN/checkpoints on disk: stopped at every file operation, retention, and damage that the manifest finds."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from card_megatron.checkpoint import files, folder
from card_megatron.checkpoint.manifest import FORMAT, MANIFEST, Manifest, describe_file, problems_of, read_manifest
from card_megatron.config.errors import CheckpointError

SHARDS = ("__0_0.distcp", ".metadata")


def save(run_dir: Path, step: int, *, keep_last: int = 3) -> Path:
    """The file operations of Saver.save(), in its order, with two small files in place of tensors."""
    unfinished = folder.make_unfinished(run_dir, step)
    manifest = Manifest(step, 8 * step, 1, layout={"world_size": 1}, config={"seed": 1.5}, versions={})
    for name in SHARDS:
        files.write(unfinished / name, f"{name} of step {step}. ".encode() * 3)
        manifest.files[name] = describe_file(unfinished / name)
    files.write(unfinished / MANIFEST, manifest.dump())
    final = folder.final_path(run_dir, step)
    folder.publish(unfinished, final)
    folder.discard(folder.to_discard(folder.visible(run_dir), keep_last, None))
    return final


def is_whole(checkpoint: Path) -> bool:
    try:
        return problems_of(checkpoint, read_manifest(checkpoint)) == []
    except CheckpointError:
        return False


# ---------------------------------------------------------------- stopped at every operation


class Stopped(BaseException):
    """Nothing may catch it, as nothing catches a SIGKILL."""


class Disk:
    """Stops before operation `stop_at`, and knows what the platters hold: only what was synced.

    Directories and files go by inode: `names` has each directory's names at its last fsync, `data` each file's bytes.
    """

    def __init__(self, root: Path, stop_at: int | None):
        self.root, self.stop_at, self.operations, self.removed = root, stop_at, 0, 0
        self.names: dict[int, dict[str, int]] = {}
        self.data: dict[int, bytes] = {}
        for path in (root, *root.rglob("*")):
            self.sync(path)

    def step(self, operation: str, path: Path, source: Path | None = None) -> None:
        if self.operations == self.stop_at:
            if operation == "remove" and path.is_dir():  # killed in the middle of the deletion
                (path / SHARDS[0]).unlink(missing_ok=True)
                self.forget(path)
            raise Stopped
        self.operations += 1
        if operation == "fsync":
            self.sync(path)
        elif operation == "write" and path.exists():
            self.data.pop(path.stat().st_ino, None)
        elif operation in ("remove", "rename") and path.exists():
            self.forget(path)

    def sync(self, path: Path) -> None:
        if path.is_dir():
            self.names[path.stat().st_ino] = {child.name: child.stat().st_ino for child in path.iterdir()}
            for child in path.iterdir():
                if child.is_dir():
                    self.names.setdefault(child.stat().st_ino, {})
        else:
            self.data[path.stat().st_ino] = path.read_bytes()

    def forget(self, path: Path) -> None:
        """The inode is free for another file: synced names of it get a number of their own.

        A deleted directory has lost its files at once, a deleted or replaced file comes back as it was.
        """
        inode = path.stat().st_ino
        self.removed -= 1
        if path.is_dir():
            self.names.pop(inode, None)
            self.names[self.removed] = {}
        else:
            self.data[self.removed] = self.data.pop(inode, b"")
        for listing in self.names.values():
            listing |= {name: self.removed for name, known in listing.items() if known == inode}

    # what a run finds afterwards

    def killed(self, target: Path) -> Path:
        """The process died: every operation so far is there."""
        return shutil.copytree(self.root, target)

    def data_lost(self, target: Path) -> Path:
        """The machine died: every name is there, but files that were not synced are empty."""
        for path in self.root.rglob("*"):
            copy = target / path.relative_to(self.root)
            if path.is_dir():
                copy.mkdir(parents=True)
            else:
                copy.write_bytes(self.data.get(path.stat().st_ino, b""))
        return target

    def names_lost(self, target: Path, inode: int | None = None) -> Path:
        """The machine died: also the names made, changed and removed since their directory was synced are as before."""
        target.mkdir()
        for name, child in self.names.get(inode or self.root.stat().st_ino, {}).items():
            if child in self.names:
                self.names_lost(target / name, child)
            else:
                (target / name).write_bytes(self.data.get(child, b""))
        return target


CRASHES = [Disk.killed, Disk.data_lost, Disk.names_lost]
SAVES = {
    # steps saved before, the one of them that is damaged, step to save, checkpoints to keep
    "the first": ([], None, 2, 3),
    "one more": ([2, 4], None, 6, 3),
    "a damaged step again": ([2, 4], 4, 4, 3),
    "retention of one": ([2, 4, 6], None, 8, 3),
    "retention of several": ([1, 2, 3, 4, 5], None, 6, 2),
}


def start(run_dir: Path, steps: list[int], damaged: int | None) -> Path:
    run_dir.mkdir()
    for step in steps:
        save(run_dir, step, keep_last=9)
    if damaged is not None:
        (folder.final_path(run_dir, damaged) / SHARDS[0]).write_bytes(b"")
    return run_dir


def stop_at(run_dir: Path, operation: int | None, new: int, keep_last: int, monkeypatch) -> Disk:
    """A save that is stopped before an operation; None lets it through to the end."""
    disk = Disk(run_dir, operation)
    with monkeypatch.context() as patch:
        patch.setattr(files, "step", disk.step)
        try:
            save(run_dir, new, keep_last=keep_last)
        except Stopped:
            return disk
    assert operation is None
    return disk


def stop_everywhere(tmp_path: Path, monkeypatch, name: str, crash) -> int:
    """Stop a save before each operation in turn, and look at what a run would find; returns how many there are."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # the Disk counts; waiting for a real one does not help
    steps, damaged, new, keep_last = SAVES[name]
    whole = [step for step in steps if step != damaged]
    operations = stop_at(start(tmp_path / "count", steps, damaged), None, new, keep_last, monkeypatch).operations
    for operation in range(operations):
        disk = stop_at(start(tmp_path / f"{operation}", steps, damaged), operation, new, keep_last, monkeypatch)
        run_dir = crash(disk, tmp_path / f"{operation} after")
        found = {folder.step_of(path): path for path in folder.visible(run_dir)}
        broken = {step for step, path in found.items() if not is_whole(path)}
        assert broken <= {damaged}, f"stopped at operation {operation}"
        assert not whole or {whole[-1], new} & found.keys() - broken, f"stopped at operation {operation}"
        latest = folder.latest(folder.checkpoints_of(run_dir))
        assert latest in {None, *(path.name for path in found.values())}, f"stopped at operation {operation}"

        folder.remove_leftovers(folder.checkpoints_of(run_dir))
        again = save(run_dir, new + 1, keep_last=keep_last)
        assert is_whole(again) and folder.visible(run_dir)[0] == again
        assert folder.latest(again.parent) == again.name
        assert {path.name for path in again.parent.iterdir()} == {
            folder.LATEST,
            *(path.name for path in folder.visible(run_dir)),
        }
    return operations


@pytest.mark.parametrize("crash", CRASHES, ids=lambda crash: crash.__name__)
@pytest.mark.parametrize("name", SAVES)
def test_a_save_may_stop_anywhere(tmp_path, monkeypatch, name, crash):
    assert stop_everywhere(tmp_path, monkeypatch, name, crash) >= 13


def write_without_sync(path: Path, data: bytes) -> None:
    files.step("write", path)
    path.write_bytes(data)


def remove_without_rename(checkpoints) -> None:
    for checkpoint in checkpoints:
        files.remove_tree(checkpoint)


def remove_without_sync(out_of_sight: list[Path]) -> None:
    for path in out_of_sight:
        files.remove_tree(path)


def point_before_rename(unfinished: Path, final: Path) -> None:
    folder.point_latest(final)
    files.rename(unfinished, final)


FAULTS = {
    "no fsync of files": (files, "write", write_without_sync, "one more", Disk.data_lost),
    "no fsync of directories": (files, "sync", lambda path: None, "retention of several", Disk.names_lost),
    "deleted under its name": (folder, "discard", remove_without_rename, "retention of several", Disk.killed),
    "deleted before its new name is on disk": (
        *(folder, "_remove", remove_without_sync),
        *("retention of several", Disk.names_lost),
    ),
    "pointer before checkpoint": (folder, "publish", point_before_rename, "one more", Disk.killed),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_this_would_find_a_writer_that_is_not_careful(tmp_path, monkeypatch, fault):
    module, name, careless, which, crash = FAULTS[fault]
    monkeypatch.setattr(module, name, careless)
    with pytest.raises(AssertionError, match="stopped at operation"):
        stop_everywhere(tmp_path, monkeypatch, which, crash)


# ---------------------------------------------------------------- names and retention


@given(st.integers(0, 10**9))
def test_only_complete_checkpoints_have_a_visible_name(step):
    assert folder.step_of(folder.final_path("run", step)) == step
    assert folder.step_of(folder.unfinished_path("run", step)) is None
    for suffix in (folder.DISCARDED, folder.DAMAGED):
        assert folder.step_of(Path(f"step_{step:06d}{suffix}-0123abcd")) is None


def test_two_attempts_at_a_step_never_share_a_folder(tmp_path, monkeypatch):
    """A killed run's writer may live on: what it still writes never gets into a later attempt's folder."""
    orphan = folder.make_unfinished(tmp_path, 4)
    (orphan / SHARDS[0]).write_bytes(b"from the orphan")
    assert is_whole(save(tmp_path, 4))
    (orphan / SHARDS[1]).write_bytes(b"still there")
    assert is_whole(folder.final_path(tmp_path, 4))
    monkeypatch.setattr(folder, "unfinished_path", lambda run_dir, step: orphan)
    with pytest.raises(FileExistsError):
        folder.make_unfinished(tmp_path, 4)


@given(st.sets(st.integers(0, 60)), st.integers(1, 5), st.none() | st.integers(1, 12))
def test_retention_by_definition(steps, keep_last, keep_every):
    newest_first = [folder.final_path("run", step) for step in sorted(steps, reverse=True)]
    let_go = {folder.step_of(path) for path in folder.to_discard(newest_first, keep_last, keep_every)}
    newest = sorted(steps)[-keep_last:]
    for step in steps:
        kept = step in newest or (keep_every is not None and step % keep_every == 0)
        assert (step in let_go) == (not kept)


def test_leftovers_go_and_damaged_checkpoints_stay(tmp_path):
    save(tmp_path, 2)
    damaged = folder.set_aside(save(tmp_path, 4), folder.DAMAGED)
    folder.set_aside(save(tmp_path, 6), folder.DISCARDED)
    folder.make_unfinished(tmp_path, 8)
    folder.remove_leftovers(folder.checkpoints_of(tmp_path))
    assert {path.name for path in damaged.parent.iterdir()} == {"step_000002", damaged.name}
    folder.remove_leftovers(tmp_path / "nowhere")


def test_latest_does_not_outlive_its_checkpoint(tmp_path):
    save(tmp_path, 2)
    newest = save(tmp_path, 4)
    folder.set_aside(folder.final_path(tmp_path, 2), folder.DAMAGED)
    assert folder.latest(newest.parent) == "step_000004"
    folder.set_aside(newest, folder.DAMAGED)
    assert folder.latest(newest.parent) is None


def test_deletion_in_the_background_is_out_of_sight_at_once(tmp_path):
    for step in (2, 4, 6):
        save(tmp_path, step)
    folder.discard(folder.visible(tmp_path)[1:], background=True)
    assert [path.name for path in folder.visible(tmp_path)] == ["step_000006"]


# ---------------------------------------------------------------- damage


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return save(tmp_path, 2)


def only_problem(checkpoint: Path) -> str:
    (problem,) = problems_of(checkpoint, read_manifest(checkpoint))
    return problem


def test_a_truncated_deleted_or_unreadable_file_is_named(checkpoint):
    shard = checkpoint / SHARDS[0]
    whole = shard.read_bytes()
    for length in range(len(whole)):
        shard.write_bytes(whole[:length])
        assert only_problem(checkpoint) == f"{shard} has {length} bytes; the manifest says {len(whole)}"
    shard.unlink()
    assert only_problem(checkpoint) == f"{shard} is missing"
    shard.symlink_to(shard)  # root may read everything, but not this
    assert only_problem(checkpoint).startswith(f"{shard} cannot be read (")


def test_every_flipped_byte_is_found(checkpoint):
    for name in SHARDS:
        whole = (checkpoint / name).read_bytes()
        for place in range(len(whole)):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << place % 8
            (checkpoint / name).write_bytes(flipped)
            assert only_problem(checkpoint).startswith(f"{checkpoint / name} has CRC-32 ")
            assert problems_of(checkpoint, read_manifest(checkpoint), checksums=False) == []
        (checkpoint / name).write_bytes(whole)


@settings(max_examples=50)
@given(st.binary(min_size=1, max_size=300), st.data())
def test_any_changed_file_is_found(tmp_path_factory, data, draw):
    changed = draw.draw(st.binary(max_size=300).filter(lambda other: other != data))
    path = tmp_path_factory.mktemp("file") / "shard"
    path.write_bytes(data)
    manifest = Manifest(1, 1, 1, {}, {}, {}, files={"shard": describe_file(path)})
    assert problems_of(path.parent, manifest) == []
    path.write_bytes(changed)
    (problem,) = problems_of(path.parent, manifest)
    assert problem.startswith(f"{path} has ")


def test_every_flipped_byte_of_the_manifest_is_found_or_means_nothing(checkpoint):
    path, before = checkpoint / MANIFEST, read_manifest(checkpoint)
    whole = path.read_bytes()
    for place in range(len(whole)):
        for bit in (1, 4, 32):
            flipped = bytearray(whole)
            flipped[place] ^= bit
            path.write_bytes(flipped)
            try:
                assert read_manifest(checkpoint) == before, "only white space may change unseen"
            except CheckpointError as error:
                assert str(path) in str(error)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"not JSON", "cannot be read"),
        (b"[1, 2]", "cannot be read"),
        (b"7", "cannot be read"),
        (b"{}", "cannot be read"),
        (b'{"format": 1, "files": []}', "cannot be read"),
        (b'{"format": 99, "pages": []}', f"has format 99; this version reads {FORMAT}"),
        (None, "no such file; "),
    ],
)
def test_a_damaged_manifest_is_named(checkpoint, content, said):
    path = checkpoint / MANIFEST
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_manifest(checkpoint)
    assert str(path) in str(caught.value) and said in str(caught.value)


def test_every_truncated_manifest_is_named(checkpoint):
    path = checkpoint / MANIFEST
    whole = path.read_bytes().rstrip()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="the checkpoint is damaged"):
            read_manifest(checkpoint)
