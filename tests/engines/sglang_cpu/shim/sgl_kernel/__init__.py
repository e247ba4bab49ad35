"""Tests only: stands in for SGLang's compiled kernels, of which the torch_native CPU path needs two."""

import torch

__version__ = "0.4.10"

_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("init_cpu_threads_env(str cpu_ids) -> str")
_library.impl(
    "init_cpu_threads_env", lambda cpu_ids: f"{torch.get_num_threads()} threads on {cpu_ids}", "CompositeExplicitAutograd"
)


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """Writes each request's new cache slots into its row of the table."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def __getattr__(name):
    """Everything else may be imported, not called."""
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*_, **__):
        raise NotImplementedError(f"sgl_kernel.{name} is not needed by the tests")

    return missing
