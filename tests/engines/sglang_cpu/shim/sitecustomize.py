"""Tests only: two repairs that let SGLang run on a plain CPU. Loaded by Python at start, from PYTHONPATH.

1. PyPI's torchvision is linked against CUDA; beside a CPU torch its import fails for want of two operators, declared here.
2. On the torch_native backend SGLang computes DeepSeek's attention unabsorbed for a prefill without a prefix, but torch_native then
   reads the compressed cache: silently wrong. The absorbed form is registered for it, through SGLang's own registry.
"""

import importlib.abc
import importlib.util
import sys

HANDLERS = "sglang.srt.models.deepseek_common.attention_backend_handler"


class Repairs(importlib.abc.MetaPathFinder):
    def __init__(self):
        self.pending = {"torchvision": self.declare_operators, HANDLERS: self.absorb}

    def find_spec(self, name, path=None, target=None):
        repair = self.pending.pop(name, None)
        return repair() if repair else None

    def declare_operators(self):
        import torch

        for operator in ("nms", "qnms"):
            torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

    def absorb(self):
        spec = importlib.util.find_spec(HANDLERS)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.AttentionBackendRegistry.register("torch_native", module._dispatch_mla_subtype)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Repairs())
