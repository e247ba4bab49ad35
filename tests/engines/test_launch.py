"""The printed commands: flags, layers for the model's depth and family, bytes a token. Only config.json is needed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from drafter_data.cli.main import run
from drafter_data.engines.hook_config import HookConfig, capture_hooks, hook_of, refuse_unusable
from drafter_data.engines.launch_sglang import CAPTURE_FOLDER, sglang_command
from drafter_data.engines.launch_vllm import vllm_command
from drafter_data.errors import InputError, PreflightRefused

DUMPS = Path("/dev/shm/dumps")


def stub(folder: Path, architecture: str, layers: int, hidden: int, *, nested: bool = False, **more: Any) -> Path:
    """A checkpoint folder of which only the configuration is there."""
    text = {"num_hidden_layers": layers, "hidden_size": hidden, "dtype": "bfloat16", **more}
    config = {"architectures": [architecture], **({"text_config": text} if nested else text)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def value(argv: tuple[str, ...], name: str) -> list[str]:
    """What follows an option, up to the next one."""
    rest = argv[argv.index(name) + 1 :]
    end = next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))
    return list(rest[:end])


@pytest.mark.parametrize(
    ("architecture", "depth", "nested", "layers", "ids"),
    [
        ("LlamaForCausalLM", 8, False, (2, 4, 5, 8), ["1", "3", "4"]),
        ("Qwen3ForCausalLM", 36, False, (2, 18, 33, 36), ["1", "17", "32"]),
        ("Qwen3VLForConditionalGeneration", 36, True, (2, 18, 33, 36), ["1", "17", "32"]),
        ("DeepseekV3ForCausalLM", 61, False, (2, 30, 58, 61), None),
        ("KimiK25ForConditionalGeneration", 61, True, (2, 30, 58, 61), None),
    ],
)
def test_sglang_command_layers_follow_depth_and_family(
    tmp_path: Path, architecture: str, depth: int, nested: bool, layers: tuple[int, ...], ids: list[str] | None
) -> None:
    command = sglang_command(stub(tmp_path, architecture, depth, 7168, nested=nested), DUMPS)
    assert command.layers == layers and command.bytes_per_token == 4 * 7168 * 2
    assert "--enable-return-aux-hidden-states" in command.argv
    name = "--return-aux-hidden-state-layer-ids"
    assert (value(command.argv, name) if name in command.argv else None) == ids
    hooks = json.loads(value(command.argv, "--forward-hooks")[0])
    assert hook_of({"forward_hooks": hooks}) == HookConfig(str(DUMPS), layers)


def test_sglang_command_custom_layers_of_a_shifting_family_come_from_input_norms(tmp_path: Path) -> None:
    command = sglang_command(stub(tmp_path, "DeepseekV3ForCausalLM", 61, 7168), DUMPS, layers=(3, 30, 61))
    assert "--enable-return-aux-hidden-states" not in command.argv
    assert "--enforce-disable-flashinfer-allreduce-fusion" in command.argv
    hooks = json.loads(value(command.argv, "--forward-hooks")[0])
    assert [hook["target_modules"] for hook in hooks[1:3]] == [["*.layers.3.input_layernorm"], ["*.layers.30.input_layernorm"]]
    found = hook_of({"forward_hooks": hooks})
    assert found is not None and found.via == "input_layernorm"


def test_sglang_command_unknown_architecture_uses_input_norms(tmp_path: Path) -> None:
    command = sglang_command(stub(tmp_path, "SomethingNewForCausalLM", 12, 64), DUMPS)
    assert command.facts["via"] == "input_layernorm"


@pytest.mark.parametrize("layers", [(2, 4, 5), (4, 2, 8), (2, 2, 8), (2, 9), (-1, 8)])
def test_command_with_impossible_layers_is_refused(tmp_path: Path, layers: tuple[int, ...]) -> None:
    model = stub(tmp_path, "LlamaForCausalLM", 8, 64)
    for build in (sglang_command, vllm_command):
        with pytest.raises(InputError, match="end with 8"):
            build(model, DUMPS, layers=layers)


def test_command_for_a_shallow_model_asks_for_layers(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="name the layers"):
        sglang_command(stub(tmp_path, "LlamaForCausalLM", 4, 64), DUMPS)


def test_command_without_a_model_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["engine", "sglang", "--model", str(tmp_path / "no"), "--dump-folder", str(DUMPS), "--print"]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1 and "config.json" in output.err


@pytest.mark.parametrize("layers", [4, 5])
def test_model_too_shallow_for_the_default_layers_is_told_to_name_them(tmp_path: Path, layers: int) -> None:
    model = stub(tmp_path, "LlamaForCausalLM", layers, 64)
    with pytest.raises(InputError, match=f"a model of {layers} layers; name the layers") as caught:
        sglang_command(model, DUMPS)
    assert caught.value.reason == "layers-coincide"
    assert sglang_command(model, DUMPS, layers=(1, 2, layers)).argv


def test_engine_sglang_print_is_the_command_as_a_shell_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = stub(tmp_path / "a model", "KimiK25ForConditionalGeneration", 61, 7168, nested=True)
    arguments = ["engine", "sglang", "--model", str(model), "--dump-folder", str(DUMPS)]
    assert run([*arguments, "--print", "--", "--tp-size", "8"]) == 0
    printed = capsys.readouterr().out
    words = shlex.split(printed.replace("\\\n", " "))
    expected = sglang_command(model, DUMPS, flags=("--tp-size", "8"))
    assert words[0] == f"PYTHONPATH={CAPTURE_FOLDER}${{PYTHONPATH:+:$PYTHONPATH}}"
    assert words[1:] == list(expected.argv)
    assert run([*arguments, "--json", "--", "--tp-size", "8"]) == 0
    assert json.loads(capsys.readouterr().out)["argv"] == list(expected.argv)


def test_engine_vllm_print_holds_layers_and_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = stub(tmp_path, "Qwen3ForCausalLM", 36, 4096)
    arguments = ["engine", "vllm", "--model", str(model), "--dump-folder", str(DUMPS), "--print", "--", "--max-model-len", "8193"]
    assert run(arguments) == 0
    words = shlex.split(capsys.readouterr().out.replace("\\\n", " "))
    speculative = json.loads(words[words.index("--speculative-config") + 1])
    assert speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 18, 33, 36]
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_extra_config"] == {"shared_storage_path": str(DUMPS)}
    assert words[-2:] == ["--max-model-len", "8193"]


def test_engine_without_its_program_says_how_to_name_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = stub(tmp_path, "LlamaForCausalLM", 8, 64)
    assert run(["engine", "vllm", "--model", str(model), "--dump-folder", str(tmp_path / "d"), "--program", "no-such-vllm"]) == 2
    assert "--program" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


def test_hook_of_a_server_without_ours_is_none() -> None:
    assert hook_of({}) is None
    assert hook_of({"forward_hooks": None}) is None
    assert hook_of({"forward_hooks": [{"hook_factory": "someone:logits", "config": {"layers": [1]}}]}) is None


@pytest.mark.parametrize("config", [{"version": 9}, {"version": 1}, {"version": 1, "layers": "x", "dump_folder": "/d"}, None])
def test_hook_of_a_configuration_that_cannot_be_read_is_refused(config: dict[str, Any] | None) -> None:
    hooks = [{"hook_factory": "sglang_hook:logits", "config": config}]
    with pytest.raises(PreflightRefused):
        hook_of({"forward_hooks": hooks})


def test_hook_of_reads_json_text_and_a_copied_module() -> None:
    wanted = HookConfig("/d", (1, 8), "post", "input_layernorm")
    hooks = capture_hooks(wanted)
    assert hook_of({"forward_hooks": json.dumps(hooks)}) == wanted
    copied = [{**hook, "hook_factory": "site.capture." + hook["hook_factory"]} for hook in hooks]
    assert hook_of({"forward_hooks": copied}) == wanted


GOOD = {"enable_return_aux_hidden_states": True, "return_aux_hidden_state_layer_ids": [1, 3, 4], "pp_size": 1}


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"cuda_graph_config": {"prefill": {"backend": "breakable"}}}, "--cuda-graph-backend-prefill"),
        ({"enable_return_aux_hidden_states": False}, "--enable-return-aux-hidden-states"),
        ({"return_aux_hidden_state_layer_ids": [1, 3, 5]}, "--return-aux-hidden-state-layer-ids 1 3 4"),
        ({"return_aux_hidden_state_layer_ids": None, "layers": (3, 4, 5, 8)}, "--return-aux-hidden-state-layer-ids 2 3 4"),
        ({"pp_size": 2}, "--pp-size"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
    ],
)
def test_launch_flags_that_defeat_the_capture_are_refused_by_name(changes: dict[str, Any], flag: str) -> None:
    hook = HookConfig("/d", changes.pop("layers", (2, 4, 5, 8)))
    refuse_unusable(GOOD, HookConfig("/d", (2, 4, 5, 8)))
    with pytest.raises(PreflightRefused, match=flag):
        refuse_unusable({**GOOD, **changes}, hook)


def test_launch_flags_of_every_printed_command_are_usable(tmp_path: Path) -> None:
    for layers, via in (((2, 4, 5, 8), "aux"), ((0, 3, 8), "input_layernorm"), ((8,), "input_layernorm")):
        hook = HookConfig("/d", layers, via=via)  # pyright: ignore[reportArgumentType]
        command = sglang_command(stub(tmp_path, "LlamaForCausalLM", 8, 64), DUMPS, layers=layers)
        ids = "--return-aux-hidden-state-layer-ids"
        info = {
            "enable_return_aux_hidden_states": "--enable-return-aux-hidden-states" in command.argv,
            "return_aux_hidden_state_layer_ids": [int(i) for i in value(command.argv, ids)] if ids in command.argv else None,
        }
        assert command.facts["via"] == via
        refuse_unusable(info, hook)
