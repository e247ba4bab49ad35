"""Bad parameters and bad disks at the command line: one line on standard error, an exit status, no traceback."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from data_contracts.parameters import ExtractionParameters
from drafter_data.checkpoints import Checkpoint
from drafter_data.cli import main
from drafter_data.cli.main import run
from drafter_data.errors import InputError
from drafter_data.store.store import Store
from tests.store.making import identity_of
from tests.store.mounts import remount, small_tmpfs
from tests.support.datasets import random_prompts, write_dataset
from tests.support.engines import running_engine

URL = "http://127.0.0.1:9"


def refused(capsys: pytest.CaptureFixture[str], reason: str, *arguments: str | Path, status: int = 2) -> str:
    """The command ends with `status` and one line that begins with `reason`; returns the line."""
    assert run([str(argument) for argument in arguments]) == status
    error = capsys.readouterr().err
    assert error.startswith(f"drafter-data: {reason}: "), error
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    "option",
    [("--in-flight", "0"), ("--in-flight", "513"), ("--chunk-samples", "0"), ("--max-error-rate", "2"), ("--keep-free-gb", "-1")],
)
def test_extract_option_out_of_bounds_is_refused_by_name(option: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["extract", "data", "--store", "store", "--url", URL, *option]) == 2
    error = capsys.readouterr().err
    assert option[0] in error
    assert "Traceback" not in error


def test_preflight_no_requests_in_flight_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["preflight", "data", "--store", "store", "--url", URL, "--in-flight", "0"]) == 2
    assert "--in-flight" in capsys.readouterr().err


def test_value_that_only_the_parameters_refuse_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "app", lambda *_, **__: ExtractionParameters(in_flight=0))  # pyright: ignore
    assert "in_flight" in refused(capsys, "bad-usage", "extract")


def adopt_with(model: Path, folder: Path) -> tuple[str | Path, ...]:
    return ("adopt", folder, "--from", "req-folders", "--store", folder / "store", "--model", model)


def test_model_that_is_a_file_is_refused(tmp_path: Path, small_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, "model-config-invalid", *adopt_with(small_model / "config.json", tmp_path))
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("name", "content", "reason", "part"),
    [
        ("config.json", "[]", "model-config-invalid", "object"),
        ("config.json", '{"hidden_size": 64, "vocab_size": 1024}', "model-config-invalid", "num_hidden_layers"),
        ("config.json", '{"num_hidden_layers": "many", "hidden_size": 64}', "model-config-invalid", "num_hidden_layers"),
        ("model.safetensors.index.json", "{", "model-weights-invalid", "index.json"),
        ("model.safetensors.index.json", "{}", "model-weights-invalid", "weight_map"),
        (
            "model.safetensors",
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "model-weights-invalid",
            "git lfs pull",
        ),
        ("model.safetensors", "no tensors here, but enough bytes", "model-weights-invalid", "model.safetensors"),
    ],
)
def test_checkpoint_with_a_damaged_file_is_refused(
    name: str, content: str, reason: str, part: str, tmp_path: Path, small_model: Path
) -> None:
    model = shutil.copytree(small_model, tmp_path / "model")
    (model / name).write_text(content)
    with pytest.raises(InputError) as caught:
        Checkpoint.open(model).weights_digest()
    assert (caught.value.reason, caught.value.exit_code) == (reason, 2)
    assert part in str(caught.value) and "\n" not in str(caught.value)


def test_lengths_of_a_read_only_dataset_are_shown_but_not_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_tmpfs(tmp_path / "disk", "size=4m") as disk:
        folder = write_dataset(disk / "data", random_prompts(5, 5, 9)).folder
        remount(disk, "ro")
        assert run(["lengths", str(folder), "--json"]) == 0
        out, error = capsys.readouterr()
    assert json.loads(out)["groups"][0]["samples"] == 5
    assert "Read-only file system" in error and error.count("\n") == 1


def test_lengths_on_a_full_disk_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_tmpfs(tmp_path / "disk", "size=256k") as disk:
        folder = write_dataset(disk / "data", random_prompts(5, 5, 9)).folder
        fill(disk / "filler")
        refused(capsys, "disk-full", "lengths", folder, status=1)
        assert not (folder / "lengths.json").exists()


def test_plan_on_a_read_only_store_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_dataset(tmp_path / "data", random_prompts(5, 5, 9)).folder
    with small_tmpfs(tmp_path / "disk", "size=4m") as disk:
        Store.open(disk / "store", identity_of()).close()
        remount(disk, "ro")
        refused(capsys, "store-not-writable", "plan", folder, "--store", disk / "store")


@pytest.mark.parametrize("command", ["preflight", "extract"])
def test_store_remounted_read_only_is_refused_by_the_preflight(
    command: str, tmp_path: Path, small_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_dataset(tmp_path / "data", random_prompts(5, 5, 9)).folder
    with small_tmpfs(tmp_path / "disk", "size=16m") as disk, running_engine(small_model) as engine:
        options = ("--kind", "embedded", "--url", engine.url, "--model", small_model, "--dump-folder", engine.dump_folder)
        arguments = [str(word) for word in (folder, "--store", disk / "store", *options, "--keep-free-gb", "0")]
        assert run(["preflight", *arguments]) == 0
        capsys.readouterr()
        remount(disk, "ro")
        assert str(disk / "store") in refused(capsys, "store-not-writable", command, *arguments)


def test_merge_onto_a_full_disk_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.jsonl").write_text(json.dumps({"conversations": [{"role": "user", "content": "q"}]}) + "\n")
    with small_tmpfs(tmp_path / "disk", "size=256k") as disk:
        fill(disk / "filler")
        assert run(["merge", str(tmp_path / "run.jsonl"), "--out", str(disk / "out")]) in (1, 2)
        error = capsys.readouterr().err
        assert "No space left" in error and error.count("\n") == 1 and "Traceback" not in error
        assert [path.name for path in disk.iterdir()] == ["filler"]


def fill(path: Path) -> None:
    """Takes what is left of the disk."""
    with path.open("wb", buffering=0) as handle:
        while True:
            try:
                handle.write(bytes(4096))
            except OSError:
                return
