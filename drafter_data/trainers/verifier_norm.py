"""The verifier's own final norm, as transformers computes it (extra `torch`): never a copy of the formula.

Gemma and some Qwen models multiply by (1 + weight), others centre: the module of the model's own class knows.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from drafter_data.checkpoints import Checkpoint
from drafter_data.errors import InputError, UsageError

TORCH_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class VerifierNorm:
    """Applies the norm to states in storage form. `module` is the model's own, its weight in the states' dtype."""

    def __init__(self, model: Path, dtype: str) -> None:
        torch, transformers = require_torch()
        checkpoint = Checkpoint.open(model)
        config = transformers.AutoConfig.from_pretrained(str(model), local_files_only=True, trust_remote_code=False)
        text_config = config.get_text_config()
        with torch.device("meta"):
            decoder = transformers.AutoModelForCausalLM.from_config(text_config).get_decoder()
        module = getattr(decoder, "norm", None)
        if module is None:
            raise InputError(
                f"{model}: {type(decoder).__name__} has no module named norm after its last layer; name another verifier",
                reason="model-norm-unknown",
            )
        self.module: Any = module.to_empty(device="cpu").eval()
        if "weight" in dict(self.module.named_parameters()):
            weight_h = torch.from_numpy(checkpoint.final_norm_weight())
            self.module.weight.data = weight_h.to(getattr(torch, TORCH_DTYPES[dtype]))

    def __call__(self, final_sh: Any) -> Any:
        """Post-norm states [S, H] of pre-norm ones, torch tensors in the store's dtype."""
        torch, _ = require_torch()
        with torch.inference_mode():
            return self.module(final_sh)


def as_torch(states: NDArray[Any], dtype: str) -> Any:
    """A torch tensor over the same memory; bfloat16 from its bit patterns."""
    torch, _ = require_torch()
    # The map is read-only and nothing here writes to it; torch has no read-only tensors and says so once.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    if dtype == "BF16":
        return torch.from_numpy(states.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(states)


def require_torch() -> tuple[Any, Any]:
    """The modules torch and transformers. Raises UsageError when the extras are missing."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UsageError(
            f"SpecForge's files are torch files, but {error.name} is not installed; "
            'pip install "drafter-data[torch,tokenize]" (torch and transformers)',
            reason="extra-missing",
        ) from error
    return cast("Any", torch), cast("Any", transformers)
