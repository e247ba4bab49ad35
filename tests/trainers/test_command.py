"""`drafter-data handoff` as users call it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from tests.trainers.world import World

SVG = "{http://www.w3.org/2000/svg}"


def drafter_data(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "drafter_data", *map(str, arguments)], capture_output=True, text=True)


def test_handoff_command_launches_ridge_and_prints_one_json_document(world: World, tmp_path: Path) -> None:
    base = ["handoff", world.dataset.folder, world.store.root, "--model", world.model, "--out", tmp_path / "out"]
    done = drafter_data(*base, "--launch", "--json", "--option", "submit=env SUBMITTED=1")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["samples"] == 24
    assert Path(record["checkpoint"]["weights_file"]).is_file()
    assert 0 <= record["checkpoint"]["metrics"]["held_out_agreement"] <= 1
    assert record["checkpoint"]["curve"][-1]["step"] == record["train_samples"]
    card = (tmp_path / "out/README.md").read_text()
    assert card.startswith("---\n")
    assert "![Samples by tokens](lengths.svg)" in card
    assert "![Samples by generation run](sources.svg)" in card
    pictures = {name: ElementTree.parse(tmp_path / f"out/{name}.svg") for name in ("lengths", "sources")}
    texts = {name: [text.text or "" for text in picture.iter(f"{SVG}text")] for name, picture in pictures.items()}
    assert texts["sources"] == ["Samples by generation run", "a", "24"]
    assert sum(int(text) for text in texts["lengths"][2::2]) == 24
    assert len(list(pictures["lengths"].iter(f"{SVG}rect"))) == len(texts["lengths"][1::2])


def test_handoff_print_shows_the_command_alone_and_check_finds_damage(world: World, tmp_path: Path) -> None:
    base = ["handoff", world.dataset.folder, world.store.root, "--model", world.model, "--out", tmp_path / "out"]
    base += ["--trainer", "speculators", "--option", "nproc=8", "--option", "epochs=3", "--option", "submit=srun -N 1"]
    printed = drafter_data(*base, "--print")
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.count("\n") == 1
    assert printed.stdout.startswith("srun -N 1 ")
    assert "--nproc_per_node 8 -m speculators.train" in printed.stdout
    assert "--epochs 3" in printed.stdout
    assert drafter_data("handoff", "--check", tmp_path / "out").returncode == 0
    damaged = tmp_path / "out/states/hs_2.safetensors"
    data = damaged.read_bytes()
    damaged.unlink()
    damaged.write_bytes(data[:-1])
    found = drafter_data("handoff", "--check", tmp_path / "out", "--json")
    assert found.returncode == 1
    assert [each["reason"] for each in json.loads(found.stdout)["findings"]] == ["file-size"]


def test_handoff_command_with_bad_input_says_one_line_and_exits_two(world: World, tmp_path: Path) -> None:
    base = ["handoff", world.dataset.folder, world.store.root, "--model", world.model]
    for arguments in (
        base,
        [*base, "--out", tmp_path / "out", "--trainer", "modelopt"],
        [*base, "--out", tmp_path / "out", "--option", "validation_share=2"],
        [*base, "--out", tmp_path / "out", "--option", "nonsense"],
        ["handoff", tmp_path, world.store.root, "--model", world.model, "--out", tmp_path / "out"],
    ):
        done = drafter_data(*arguments)
        assert done.returncode == 2, done
        assert done.stderr.count("\n") == 1
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
