"""Tests only: copied into the tiny Kimi checkpoint, since SGLang asks the checkpoint for a processor. Text only."""

from pathlib import Path

from transformers import PreTrainedTokenizerFast
from transformers.image_processing_utils import BaseImageProcessor
from transformers.processing_utils import ProcessorMixin


class TinyMedia(BaseImageProcessor):
    media_proc_cfg = {
        "patch_size": 14,
        "merge_kernel_size": 2,
        "in_patch_limit": 4096,
        "patch_limit_on_one_side": 64,
        "fixed_output_tokens": None,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }

    def media_tokens_calculator(self, media):
        width, height = media["image"].size
        return (width // 28) * (height // 28)


class TinyKimiProcessor(ProcessorMixin):
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.chat_template = None
        self.image_processor = self.media_processor = TinyMedia()

    @classmethod
    def from_pretrained(cls, path, *_, **__):
        file = str(Path(path) / "tokenizer.json")
        return cls(PreTrainedTokenizerFast(tokenizer_file=file, unk_token="t3", pad_token="t0", bos_token="t1", eos_token="t2"))

    def __call__(self, text=None, medias=None, **_):
        return {"input_ids": self.tokenizer(text[0], return_tensors="pt")["input_ids"]}
