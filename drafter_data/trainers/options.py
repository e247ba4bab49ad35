"""Trainer options: a few are the hand-off's own, the rest go to the trainer's command as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from drafter_data.errors import UsageError

OWN_OPTIONS = {
    "validation_share": "share of prompts held out, by content hash (default 0.1)",
    "max_error_rate": "largest share of rows that may fail the checks of the hand-off itself (default 0)",
    "draft_vocab_size": "size of the drafter's reduced vocabulary (default: the whole one)",
    "verify_all": "true: read every state whole before it is handed off",
    "recover_pre_norm": "speculators, of a post-norm store: true: hand off a copy with post / scale for the state before the norm",
    "python": "interpreter of the environment that has the trainer (default: this one)",
    "script": "a script to run in place of the trainer's module",
    "device": "cpu: train without a GPU, for demonstrations and tests",
    "states_dtype": "specforge: bfloat16 (default) or store, which keeps the store's dtype",
    "workers": "specforge: samples converted at once",
    "nproc": "processes a node, through torchrun (default: 1, without torchrun)",
    "submit": "a command that takes the training command as its last arguments, such as `sbatch --wait --wrap`",
    "silence_seconds": "end the job when it writes nothing for so long (default: half an hour and the time to read all files)",
}
"""Every option that the hand-off itself reads. `env.NAME` sets a variable for the job."""


def parse_options(texts: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE` each. Raises UsageError."""
    options: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise UsageError(f"option {text!r}: expected NAME=VALUE", reason="bad-option")
        options[name] = value
    return options


def fraction(options: Mapping[str, str], name: str, default: float, *, or_one: bool = False) -> float:
    """A number of 0 up to, but not (unless `or_one`), 1. Raises UsageError."""
    text = options.get(name, str(default))
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (0 <= value < 1 or (or_one and value == 1)):
        raise UsageError(f"option {name}: expected a number from 0 up to 1, found {text!r}", reason="bad-option")
    return value


def whole_number(options: Mapping[str, str], name: str, default: int | None = None) -> int | None:
    """A positive whole number, or `default`. Raises UsageError."""
    text = options.get(name)
    if text is None or not text:
        return default
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UsageError(f"option {name}: expected a positive whole number, found {text!r}", reason="bad-option")
    return int(text)


def is_true(options: Mapping[str, str], name: str) -> bool:
    """Whether an option is switched on. Raises UsageError for anything but true or false."""
    text = options.get(name, "false").lower()
    if text not in ("true", "false"):
        raise UsageError(f"option {name}: expected true or false, found {text!r}", reason="bad-option")
    return text == "true"


def on_cpu(options: Mapping[str, str]) -> bool:
    """Whether the job is to do without a GPU. Raises UsageError for another device than cpu."""
    device = options.get("device", "")
    if device not in ("", "cpu"):
        raise UsageError(f"option device: expected cpu or nothing, found {device!r}", reason="bad-option")
    return device == "cpu"


def environment_prefix(options: Mapping[str, str]) -> list[str]:
    """`env NAME=value ...` for the options `env.NAME`, so that the printed command is the whole command."""
    settings = [f"{name.removeprefix('env.')}={value}" for name, value in sorted(options.items()) if name.startswith("env.")]
    return ["env", *settings] if settings else []


def trainer_flags(options: Mapping[str, str]) -> dict[str, str]:
    """What is left for the trainer: `some_name` becomes `--some-name`."""
    return {
        f"--{name.replace('_', '-')}": value
        for name, value in options.items()
        if name not in OWN_OPTIONS and not name.startswith("env.")
    }


def flag_list(flags: Mapping[str, str]) -> list[str]:
    """`--name value` for each flag; a flag set to `true` stands alone, one set to `false` is left out."""
    argv: list[str] = []
    for name, value in flags.items():
        if value == "true":
            argv.append(name)
        elif value != "false":
            argv += [name, *value.split()]
    return argv
