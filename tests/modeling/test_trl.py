"""Stock SFTTrainer and DPOTrainer of TRL with LoRA on attention and experts, on a model with packed experts.

They train, checkpoint, resume, generate, and log what the stock model logs; gradient checkpointing is on by TRL's
default.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from ktransformers.modeling.prepare import prepare
from ktransformers.nn import load_model, lora_parameters
from tests.support.tiny_models import VOCABULARY, build, save, tokens

pytest.importorskip("trl")
pytest.importorskip("datasets")
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

pytestmark = pytest.mark.filterwarnings("ignore")
TARGETS = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3_moe", output_router_logits=True), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    special = ["<pad>", "<bos>", "<eos>"]
    words = special + [f"w{index}" for index in range(len(special), VOCABULARY)]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<pad>"
    )


def sentence(start: int, count: int) -> str:
    return " ".join(f"w{3 + (start * 7 + step * 5) % (VOCABULARY - 3)}" for step in range(count))


def ours(directory: Path) -> PreTrainedModel:
    return load_model(directory, dtype=torch.float32)


def stock(directory: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager"
    )
    return model


def options(out: Path, steps: int, **more: Any) -> dict[str, Any]:
    actual = {
        "output_dir": str(out),
        "max_steps": steps,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "seed": 5,
    }
    return actual | more


def sft(model: PreTrainedModel, tokenizer: Any, out: Path, steps: int, **more: Any) -> SFTTrainer:
    torch.manual_seed(5)
    return SFTTrainer(
        model=model,
        args=SFTConfig(**options(out, steps, **more)),
        train_dataset=Dataset.from_list([{"text": sentence(row, 12)} for row in range(4)]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS),
    )


def logged(trainer: Any, key: str = "loss") -> list[float]:
    return [float(entry[key]) for entry in trainer.state.log_history if key in entry]


def test_sft_trainer(directory: Path, tokenizer: Any, tmp_path: Path) -> None:
    trainer = sft(ours(directory), tokenizer, tmp_path / "a", 6, save_strategy="steps", save_steps=3)
    model = trainer.model
    assert isinstance(model, PeftModel) and trainer.args.gradient_checkpointing
    before = {name: parameter.detach().clone() for name, parameter in lora_parameters(model).items()}
    assert len(before) == 8 and all(parameter.requires_grad for parameter in lora_parameters(model).values())
    trainer.train()
    losses = logged(trainer)
    assert len(losses) == 6 and sum(losses[4:]) < sum(losses[:2]) - 0.4
    assert all(not torch.equal(parameter, before[name]) for name, parameter in lora_parameters(model).items())

    reference = sft(stock(directory), tokenizer, tmp_path / "b", 6)
    reference.train()
    assert losses == pytest.approx(logged(reference), rel=2e-3)
    assert logged(trainer, "aux_loss") == pytest.approx(logged(reference, "aux_loss"), rel=2e-3)
    assert logged(trainer, "aux_loss")[0] > 0

    resumed = sft(ours(directory), tokenizer, tmp_path / "c", 6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert logged(resumed)[-3:] == pytest.approx(losses[3:], rel=1e-4)

    words = model.eval().generate(input_ids=tokens(1, 4), max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert words.shape == (1, 8)
    trainer.save_model(tmp_path / "adapter")
    again = PeftModel.from_pretrained(stock(directory), tmp_path / "adapter")
    assert torch.equal(
        again.generate(input_ids=tokens(1, 4), max_new_tokens=4, do_sample=False, eos_token_id=None), words
    )


def dpo(model: PreTrainedModel | str, tokenizer: Any, out: Path, **more: Any) -> DPOTrainer:
    torch.manual_seed(5)
    rows = [
        {"prompt": sentence(row, 4), "chosen": " " + sentence(row + 1, 5), "rejected": " " + sentence(row + 30, 5)}
        for row in range(2)
    ]
    return DPOTrainer(
        model=model,
        args=DPOConfig(**options(out, 4, **more)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS),
    )


def test_dpo_trainer(directory: Path, tokenizer: Any, tmp_path: Path) -> None:
    """The reference is the model with its adapters off, so the first loss is ln 2, apart from the router's."""
    trainer = dpo(ours(directory), tokenizer, tmp_path / "a", save_strategy="steps", save_steps=2)
    assert trainer.ref_model is None
    trainer.train()
    losses, router = logged(trainer), logged(trainer, "aux_loss")
    assert losses[0] - trainer.router_aux_loss_coef * router[0] == pytest.approx(math.log(2), abs=1e-4)
    assert losses[-1] < losses[0] - 0.1

    prepare(directory, tmp_path / "model")  # resumed from the name of a directory, which TRL opens by itself
    resumed = dpo(str(tmp_path / "model"), tokenizer, tmp_path / "b", model_init_kwargs={"dtype": "float32"})
    assert len(lora_parameters(resumed.model)) == 8
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert logged(resumed)[-2:] == pytest.approx(losses[2:], rel=1e-4)
    words = resumed.model.eval().generate(input_ids=tokens(1, 4), max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert words.shape == (1, 7)
