"""Settings of PEFT's LoRA that cannot be used in federated training."""

REFUSED_SETTINGS = {
    "use_dora": "its magnitudes change the base weight's columns, so an update is no longer s·B A",
    "lora_bias": "a bias beside B is not part of the low-rank update",
    "rank_pattern": "ranks are set per client and not per layer",
    "alpha_pattern": "the scale is set per client and not per layer",
    "layer_replication": "it copies layers of the base",
    "trainable_token_indices": "it trains rows of the base's embedding",
    "target_parameters": "it adapts parameters that are no layer's weight; name layers in target_modules",
    "megatron_config": "layers of Megatron are split over processes",
    "modules_to_save": "a classification head is trained without it: it is part of what a client trains, and the "
    "setting for heads says whether it is shared, personal or frozen",
    "loftq_config": "LoftQ changes the base",
    "eva_config": "EVA draws A from data, which differ between clients",
    "corda_config": "CorDA changes the base",
    "lora_ga_config": "LoRA-GA changes the base",
    "use_qalora": "its A has a row of pooled inputs",
    "ensure_weight_tying": "a pair of factors belongs to one layer",
}
"""Settings that must keep their default, with the reason."""
