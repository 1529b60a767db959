"""One rank's experts of a model without the model around them: for a host that computes experts alone
(`serve/hosts/expert_host.py`). Expert layers are found on a model of the meta device; no other weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ktransformers import _core
from ktransformers.experts.contract import Contract
from ktransformers.experts.partition import ExpertShard, LayerShard
from ktransformers.experts.recoded_layer import ExpertFormats
from ktransformers.experts.store import ExpertStore
from ktransformers.modeling.load import open_files
from ktransformers.modeling.quantizer import KTConfig, KTQuantizer
from ktransformers.modeling.skeleton import meta_model


@dataclass(frozen=True)
class ShardLayer:
    """One rank's experts of one layer; `store` is None if it has none."""

    name: str
    contract: Contract
    shard: LayerShard
    store: ExpertStore | None


def load_shard(
    path: str | Path,
    shard: ExpertShard,
    *,
    experts: str | Path | None = None,
    pool: _core.Pool | None = None,
    isa: str | None = None,
    verify: bool | None = None,
    formats: ExpertFormats | None = None,
) -> list[ShardLayer]:
    """The layers in the order of the model. Options as in `load_model`."""
    path = Path(path)
    config = KTConfig(isa=isa, pool=pool, verify=verify, widen=False, shard=shard, formats=formats)
    source = open_files(path, config, experts)
    if source.quantised:
        config.weights = config.weights or source
    files = sorted(str(file) for file in path.glob("*.safetensors")) if path.is_dir() else []
    quantizer = KTQuantizer(config)
    quantizer.validate_environment()
    quantizer.open_layers(meta_model(path), files)
    layers = []
    for layer, layer_shard, store in quantizer.load_stores():
        assert layer_shard is not None
        layers.append(ShardLayer(layer.name, layer.contract, layer_shard, store))
    return layers
