"""What is left out on a CPU changes nothing: the head on rows without a label, attention between packed rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from trl import SFTTrainer

from ktransformers.train import build as building
from ktransformers.train import run as running
from ktransformers.train.batches import labelled_positions
from ktransformers.train.model import open_trained
from ktransformers.train.packed_attention import (
    PACKED_ROWS,
    PaddedRows,
    RowAttention,
    has_full_attention,
    use_packed_attention,
)
from ktransformers.train.plan import make_plan
from ktransformers.train.resolve import read_settings
from ktransformers.train.trainers import SupervisedTrainer
from tests.support.tiny_models import build
from tests.support.training import recipe
from tests.support.training_runs import difference, first_gradients, run

PADDED = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "max_samples": 6}
PACKED = PADDED | {"packing": True, "cutoff_len": 128, "gradient_accumulation_steps": 3}


@pytest.mark.parametrize("kind", [PADDED, PACKED], ids=["padded", "packed"])
def test_packed_attention_gradients_equal_sdpa(
    kind: dict[str, Any], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's own loss on all rows, and transformers' own mask."""
    keys = recipe(tiny, tmp_path / "x", **kind)
    ours = first_gradients(keys)
    kept = first_gradients(keys | {"disable_gradient_checkpointing": True})
    monkeypatch.setattr(SupervisedTrainer, "compute_loss", SFTTrainer.compute_loss)
    monkeypatch.setattr(building, "use_packed_attention", lambda model: False)
    stock = first_gradients(keys)
    assert any(bool(gradient.ne(0).any()) for gradient in stock.values())
    assert difference(ours, stock) < 1e-5 and difference(kept, stock) < 1e-5


def test_proof_is_recorded_with_sdpa(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 the same sums rounded elsewhere are other numbers, and `kt prove` would say so."""
    seen: list[str] = []
    finish, attend = running.write_output, building.use_packed_attention

    def looking(trainer: Any, *args: Any) -> Any:
        seen.append(trainer.model.config._attn_implementation)
        return finish(trainer, *args)

    def attending(model: Any) -> bool:
        found = attend(model)
        seen.append(model.config._attn_implementation)
        return found

    monkeypatch.setattr(running, "write_output", looking)
    monkeypatch.setattr(building, "use_packed_attention", attending)
    run(recipe(tiny, tmp_path / "x", **PACKED) | {"max_steps": 1})
    assert seen == [PACKED_ROWS, "sdpa"]


def losses(trainer: Any, inputs: dict[str, Any], count: Any) -> tuple[float, float, dict[str, list[float]]]:
    """(ours, TRL's, what each noted)."""
    ours = trainer.compute_loss(trainer.model, dict(inputs), num_items_in_batch=count)
    theirs = SFTTrainer.compute_loss(trainer, trainer.model, dict(inputs), num_items_in_batch=count)
    ours.backward()  # also where nothing is learned
    noted = {name: trainer._metrics["train"][name] for name in ("entropy", "mean_token_accuracy")}
    return ours.item(), theirs.item(), noted


def test_labelled_rows_loss_equals_trl(tiny: Path, tmp_path: Path) -> None:
    """Whatever the number of labels: of the batch, of the whole step, or none at all."""
    settings = read_settings(recipe(tiny, tmp_path / "x", **PADDED))
    prepared = make_plan(settings)
    assert prepared.directory is not None
    model = open_trained(prepared.directory, settings, torch.float32, torch.device("cpu"))
    trainer = running.build_trainer(model, prepared)
    trainer.model.train()
    inputs = next(iter(trainer.get_train_dataloader()))
    share = inputs["labels"].ne(-100).float().mean()
    assert 0.1 < share < 0.9, "nothing would be left out"
    for count in (None, torch.tensor(1000)):
        ours, theirs, noted = losses(trainer, inputs, count)
        assert ours == pytest.approx(theirs, rel=1e-6) and ours > 0
        for values in noted.values():
            assert values[-2] == pytest.approx(values[-1], rel=1e-5)
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    ours, theirs, _ = losses(trainer, inputs, torch.tensor(7))
    assert ours == theirs == 0


def test_selected_rows_have_a_label() -> None:
    labels = torch.tensor([[-100, 5, -100, 7], [3, -100, -100, -100]])
    assert labelled_positions(labels).tolist() == [[True, False, True], [False, False, False]]
    assert labelled_positions(torch.full((2, 3), -100)).sum() == 1


def test_packed_attention_equals_masked_attention(tiny: Path) -> None:
    ids = torch.arange(3, 27)[None]
    borders = torch.tensor([0, 5, 6, 24], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in borders.diff().tolist()])[None]
    padded, mask = ids.reshape(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    model: Any = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    packed = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    expected = [model(**packed).logits, model(input_ids=padded, attention_mask=mask).logits]
    assert use_packed_attention(model) and model.config._attn_implementation == PACKED_ROWS
    for more in ({"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}, {}):
        assert torch.allclose(model(**packed, **more).logits, expected[0], atol=1e-5)
    assert torch.allclose(model(input_ids=padded, attention_mask=mask).logits, expected[1], atol=1e-5)
    one = model(input_ids=ids, use_cache=False).logits
    assert not torch.allclose(one, expected[0], atol=1e-3), "rows that see each other differ"
    made = model.generate(ids[:, :6], max_new_tokens=4, do_sample=False)
    model.set_attn_implementation("sdpa")
    assert torch.equal(made, model.generate(ids[:, :6], max_new_tokens=4, do_sample=False))


@pytest.mark.parametrize("lengths", [[5, 1, 18, 40], [33], [7] * 9], ids=str)
def test_row_attention_matches_reference(lengths: list[int]) -> None:
    """Forward and backward in float64 against SDPA with a mask; heads share keys, values are narrower."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(lengths)
    sizes = ((6, 8), (2, 8), (2, 4), (6, 4))
    q, k, v, grad = (torch.randn(tokens, *size, generator=generator, dtype=torch.float64) for size in sizes)
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = (owner[:, None] == owner) & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    wide = [tensor.transpose(0, 1).repeat_interleave(6 // tensor.shape[1], 0) for tensor in inputs]
    stock = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=mask, scale=0.3).transpose(0, 1)
    ours = RowAttention.apply(*inputs, PaddedRows.from_lengths(lengths), 0.3)
    assert torch.allclose(ours, stock, atol=1e-12)
    expected, found = (torch.autograd.grad(out, inputs, grad, retain_graph=True) for out in (stock, ours))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_bf16_packed_attention_is_close_to_float32(tiny: Path) -> None:
    ids = torch.arange(3, 63)[None]
    borders = torch.tensor([0, 20, 33, 60], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in borders.diff().tolist()])[None]
    given = {"input_ids": ids, "position_ids": positions, "use_cache": False, "cu_seq_lens_q": borders}
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (False, True):
            model: Any = AutoModelForCausalLM.from_pretrained(tiny, dtype=dtype)
            assert not rows or use_packed_attention(model)
            loss = model(**given).logits.float().logsumexp(-1).mean()
            loss.backward()
            found[dtype, rows] = model.model.layers[0].self_attn.k_proj.weight.grad.float()
    exact = found[torch.float32, False]
    errors = {key: float((value - exact).norm() / exact.norm()) for key, value in found.items()}
    assert errors[torch.float32, True] < 1e-5
    assert errors[torch.bfloat16, True] < 1.2 * errors[torch.bfloat16, False] < 0.1


def test_sliding_window_models_keep_sdpa() -> None:
    assert has_full_attention(build("mixtral", sliding_window=None).config)
    assert not has_full_attention(build("mixtral", sliding_window=16).config)
    assert not use_packed_attention(build("mixtral", sliding_window=16))
