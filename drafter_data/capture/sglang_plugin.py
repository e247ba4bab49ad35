"""The second way into SGLang: a plugin (entry-point group `sglang.srt.plugins`) in place of module hooks, for prefill graphs.

A replayed graph calls no module hook, and its logits processor sees a batch without request ids. So the pass is taken where both
ends are whole: `ModelRunner.forward` gets the batch with its ids and returns the aux states and the final state; the state before
the final norm is copied, inside the graph where there is one, into a buffer that outlives it.

SGLang finds the plugin by the folder `drafter_data_capture-1.dist-info` beside this file: this folder on PYTHONPATH is all that it
takes. It does nothing unless `--forward-hooks` names `sglang_plugin:configuration`, which is where its configuration comes from and
where the client sees it.

Shown on a CPU, where passes are eager; graphs have been read in SGLang 0.5.23, not run. The self-check of sglang_hook decides.

Tensor legend: T rows of a pass, H hidden size.
"""

import logging

import sglang_hook
import torch

_log = logging.getLogger("drafter_data.capture")
_FINAL_NORM = "sglang.srt.layers.layer_boundary.residual.batch.final_norm"
_FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
_BUFFER_ROWS = 16384


def configuration(_config):
    """Named by --forward-hooks to carry the configuration; it registers no hook (SGLang warns of that once)."""
    return


def register():
    """The entry point: wraps the final norm and the model runner's forward pass."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    plugin = Plugin()
    HookRegistry.register(_FINAL_NORM, plugin.around_final_norm, HookType.AROUND)
    HookRegistry.register(_FORWARD, plugin.after_forward, HookType.AFTER)


class Plugin:
    """State of one scheduler process."""

    def __init__(self):
        self._capture = None
        self._configured = False
        self._before_th = None
        self._norm = None

    def _find_capture(self):
        """Our capture when the server is configured for the plugin, else None. Read once: the arguments do not change."""
        if not self._configured:
            from sglang.srt.runtime_context import get_observability

            specs = get_observability().forward_hooks or []
            ours = [spec for spec in specs if spec.get("hook_factory") == "sglang_plugin:configuration"]
            if ours:
                settings = {**ours[0]["config"], "via": "aux"}
                self._capture = sglang_hook.Capture(settings)
            self._configured = True
        return self._capture

    def around_final_norm(self, original, hidden_states, forward_batch, layernorm, capture=None, **more):
        """Also keeps the state before the norm."""
        if self._find_capture() is None:
            return original(hidden_states, forward_batch, layernorm, capture, **more)

        def keep(before_th):
            if capture is not None:
                capture(before_th)
            self._keep(layernorm, before_th)

        return original(hidden_states, forward_batch, layernorm, keep, **more)

    def _keep(self, layernorm, before_th):
        try:
            rows, hidden = before_th.shape
            capturing = before_th.is_cuda and torch.cuda.is_current_stream_capturing()
            if (self._before_th is None or self._before_th.shape[0] < rows) and not capturing:
                self._before_th = before_th.new_empty((max(rows, _BUFFER_ROWS), hidden))
            self._norm = layernorm
            self._before_th[:rows].copy_(before_th)
        except Exception:  # noqa: BLE001 - an exception would end the server
            _log.exception("drafter-data: state before the final norm")

    def after_forward(self, result, _runner, forward_batch, *_, **__):
        """End of a pass: writes each of our requests' rows and acknowledges."""
        try:
            capture, output = self._find_capture(), getattr(result, "logits_output", None)
            if capture is None or output is None or forward_batch.rids is None or not forward_batch.forward_mode.is_extend():
                return
            final_th, aux = getattr(output, "last_hidden_states", None), getattr(output, "hidden_states", None)
            if final_th is None or self._before_th is None:
                _log.error("drafter-data: a pass without its states: --enable-return-aux-hidden-states is missing")
                return
            norm = (self._norm, self._before_th[: final_th.shape[0]])
            capture.on_pass(forward_batch, forward_batch.input_ids, final_th, aux, norm, {}, output)
        except Exception:  # noqa: BLE001 - an exception would end the server
            _log.exception("drafter-data: forward pass")
