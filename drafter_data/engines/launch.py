"""What both engine launchers share: the command as data, and how it is shown."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafter_data.checkpoints import Checkpoint, default_layers
from drafter_data.errors import InputError

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class LaunchCommand:
    """How an engine is started, and what it will capture.

    `env` holds what is set in its environment, `search` folders put in front of PYTHONPATH.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    search: tuple[str, ...]
    layers: tuple[int, ...]
    bytes_per_token: int
    facts: dict[str, Any] = field(default_factory=dict[str, Any])

    def environment(self) -> dict[str, str]:
        """This process's environment with the engine's additions."""
        found = {**os.environ, **self.env}
        if self.search:
            found["PYTHONPATH"] = os.pathsep.join([*self.search, *filter(None, [found.get("PYTHONPATH")])])
        return found

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            "argv": list(self.argv),
            "env": self.env,
            "pythonpath_prefix": list(self.search),
            "layers": list(self.layers),
            "bytes_per_token": self.bytes_per_token,
            **self.facts,
        }

    def shell(self) -> str:
        """The command for a POSIX shell, one option a line."""
        lines = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        if self.search:
            lines.append(f"PYTHONPATH={shlex.quote(os.pathsep.join(self.search))}${{PYTHONPATH:+:$PYTHONPATH}}")
        words = [shlex.quote(word) for word in self.argv]
        line = words[0]
        for word in words[1:]:
            if word.startswith("--"):
                lines.append(line)
                line = word
            else:
                line += f" {word}"
        return " \\\n  ".join([*lines, line])


def checked_layers(checkpoint: Checkpoint, layers: Sequence[int] | None) -> tuple[int, ...]:
    """Layers to capture as Hugging Face indices, the final one last; None: EAGLE-3's for the model's depth.

    Raises InputError (`layers-invalid`) unless they are distinct, ascending, in 0..n and end with n.
    """
    depth = checkpoint.num_layers
    if layers is None:
        return default_layers(depth)
    found = tuple(layers)
    if list(found) != sorted(set(found)) or not found or found[0] < 0 or found[-1] != depth:
        raise InputError(
            f"--layers {','.join(map(str, found))}: expected distinct, ascending Hugging Face indices that end with {depth}, "
            f"the final state of {checkpoint.folder}, for example {','.join(map(str, (2, depth // 2, depth - 3, depth)))}",
            reason="layers-invalid",
        )
    return found


def bytes_per_token(checkpoint: Checkpoint, layers: Sequence[int], dtype: str | None) -> int:
    """Bytes that one token's states take: layers x hidden x itemsize of the dtype that the model runs in."""
    text = checkpoint.text_config
    name = dtype or text.get("dtype") or text.get("torch_dtype") or checkpoint.config.get("dtype") or "bfloat16"
    return len(layers) * checkpoint.hidden_size * ITEM_BYTES.get(str(name), 2)


def option(flags: Sequence[str], name: str) -> str | None:
    """The value of `--name value` or `--name=value` among launch flags; the last one counts, as with argparse."""
    value = None
    for i, flag in enumerate(flags):
        if flag == name and i + 1 < len(flags):
            value = flags[i + 1]
        elif flag.startswith(f"{name}="):
            value = flag.partition("=")[2]
    return value


def absolute(path: Path) -> str:
    """An absolute path without resolving links: the server may run from another folder."""
    return str(path if path.is_absolute() else Path.cwd() / path)
