"""`kt serve --kt-method FORMAT`: experts of a bf16 folder are quantized while they are loaded, and planned so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ktransformers.experts.backend import packed_experts
from ktransformers.experts.contract import expert_modules
from ktransformers.ground.errors import InputError
from ktransformers.nn import load_model
from ktransformers.plan import Plan
from ktransformers.serve.flags import parse
from ktransformers.serve.forecast import plan_server
from ktransformers.serve.loading import open_service
from ktransformers.serve.target import resolve_target
from ktransformers.serve.yaml_keys import with_yaml_keys

pytestmark = pytest.mark.filterwarnings("ignore:.*bf16.*")


@pytest.mark.parametrize("word", ["int8", "int4:32", "int4"])
def test_experts_are_quantized_as_the_plan_says(word: str, model_directory: Path) -> None:
    launch = parse([str(model_directory), "--device", "cpu", "--kt-method", word, "--max-total-tokens", "256"])
    target, plans = resolve_target(str(model_directory)), list[Plan]()
    plan = plan_server(launch, target, lambda _: None, plans.append)
    assert plan is not None and plan.nearest.choice.format == word.partition(":")[0] and not launch.notes
    service = open_service(launch, target, lambda _: None, plan)
    spec = {"int4": "int4:32"}.get(word, word)
    assert service.approximations == {"kt_method": spec}
    quantized, plain = load_model(model_directory, formats=spec), load_model(model_directory)
    assert decoded(service.engine.forward.model, spec) == decoded(quantized, spec) != decoded(plain, "bf16")


def decoded(model: Any, spec: str) -> list[list[float]]:
    """Rows of the first expert of every layer, whose store is in this format."""
    stores = [kt.store for module in expert_modules(model).values() if (kt := packed_experts(module)) is not None]
    assert stores and all(set(store.formats.values()) == {spec} for store in stores)
    return [store.decode("down", 0)[0].tolist() for store in stores]


def test_words_of_earlier_guides_say_what_quantizes() -> None:
    assert parse(["M", "--kt-method", "AMXINT4"]).expert_format is None
    (note,) = parse(["M", "--kt-method", "AMXINT4"]).notes
    assert note.endswith("--kt-method int4:32 quantizes them while they are loaded")
    given = parse(["M", "--kt-method", "int8"])
    assert with_yaml_keys(given, {"kt_backend": "AMXInt4"}).expert_format == "int8"
    assert with_yaml_keys(parse(["M"]), {"kt_backend": "AMXInt4"}).expert_format == "int4:32"
    for wrong in ("int9", "iq2_xs"):
        with pytest.raises(InputError, match=f"kt-method: given {wrong}"):
            parse(["M", "--kt-method", wrong])
