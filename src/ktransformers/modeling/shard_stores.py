"""One rank's experts of a model without the model around them: for a host that computes experts alone
(`serve/nodes/expert_node.py`). Expert layers are found on a model of the meta device; no other weight is read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ktransformers.experts.contract import Contract
from ktransformers.experts.partition import LayerShard
from ktransformers.experts.store import ExpertStore
from ktransformers.modeling.load import meta_model, open_files, quantizer_of
from ktransformers.modeling.quantizer import KTQuantizer
from ktransformers.modeling.spec import ModelSpec


@dataclass(frozen=True)
class ShardLayer:
    """One rank's experts of one layer; `store` is None if it has none."""

    name: str
    contract: Contract
    shard: LayerShard
    store: ExpertStore | None


def load_shard(spec: ModelSpec) -> list[ShardLayer]:
    """The layers of `spec.shard`, in the order of the model."""
    path, config = spec.path, quantizer_of(replace(spec, widen=False))  # no dense weight is loaded
    source = open_files(path, config, spec.experts)
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
